"""Dependencies point one way: a lower layer imports nothing of a higher one when it is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hyper_parallel"
LAYERS = ("errors", "config", "platform", "core", "loss_parallel", "models", "tensor_parallel", "trainer", "cli")
BELOW_ALL = ("hyper_parallel.core.shard_spec",)
"""Plain values without an import of their own, which the backends cut parameters by."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of what a file imports from the library at load, types left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hyper_parallel."):
            yield node.lineno, node.module


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_looks_down(layer: str) -> None:
    folder = ROOT / layer
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imports(path)
        if module not in BELOW_ALL and LAYERS.index(module.split(".")[1]) > LAYERS.index(layer)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_backends_do_not_know_each_other() -> None:
    for one, other in (("torch", "mindspore"), ("mindspore", "torch")):
        for path in (ROOT / "platform" / one).rglob("*.py"):
            assert f"platform.{other}" not in path.read_text(encoding="utf-8"), path
