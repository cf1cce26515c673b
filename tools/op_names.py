"""Operator names of every platform in the tree: what each means to the dispatcher.

Run from the repository root; needs no framework, the sources and tables are read as text::

    python -m tools.op_names             # print the page
    python -m tools.op_names --write     # put it into docs/op_names.md
    python -m tools.op_names --check     # fail when the page there is another one
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["main", "render"]

_ROOT = Path(__file__).resolve().parents[1]
_PAGE = _ROOT / "docs" / "op_names.md"
_OPS = _ROOT / "hyper_parallel" / "core" / "shard" / "ops"
_PLATFORMS = {"torch": "PyTorch", "mindspore": "MindSpore"}

_MEANINGS = {
    "cross_entropy": "the fused loss: target index, `weight`, `ignore_index`, `reduction`",
    "log_softmax": "log-probabilities, over a dim that one mesh dim shards",
    "nll_loss": "picks the target's log-probability: the second half of the decomposed loss",
}

_HEAD = """\
# Operator names

Written by `python -m tools.op_names --write` from the tables and sources.

The dispatcher knows an operator by the name that `get_platform().get_op_name(call)` gives it. A name in the first
table of a platform belongs to the loss; `loss_parallel()` takes it over. Every other name is served by a *family*, the
rule that infers the layout of the result. An in-place operator (`add_`) is served by the family of `add`. An operator
without a family runs when all its DTensors are replicated and is refused otherwise; see
[adding one](guide/extending.md).
"""


def render() -> str:
    """The page, in Markdown."""
    families = dict(_families())
    parts = [_HEAD]
    for platform, title in _PLATFORMS.items():
        names = _ROOT / "hyper_parallel" / "platform" / platform / "op_names.py"
        tables = _OPS / "yaml" / platform
        if names.is_file() and tables.is_dir():
            parts.append(_platform(title, names, tables, families))
    return "\n".join(parts)


def _platform(title: str, names: Path, tables: Path, families: Mapping[str, str]) -> str:
    loss = _literal(names, "LOSS_OP_NAMES")
    lines = [f"## {title}", "", "### Loss", "", "| Name | Is | Meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | `{kind}` | {_MEANINGS[kind]} |" for name, kind in loss.items()]
    served: dict[str, list[str]] = defaultdict(list)
    for name, family in sorted(_operators(tables)):
        served[family].append(name)
    lines += ["", "### Families", "", "| Family | Rule | Operators |", "|---|---|---|"]
    for family, operators in sorted(served.items()):
        lines.append(f"| `{family}` | {families[family]} | {', '.join(f'`{name}`' for name in operators)} |")
    spellings: dict[str, list[str]] = defaultdict(list)
    for spelling, name in _literal(names, "_SAME").items():
        spellings[name].append(spelling)
    if spellings:
        lines += ["", "### Other spellings", "", "| Name | Also |", "|---|---|"]
        lines += [f"| `{name}` | {', '.join(f'`{s}`' for s in also)} |" for name, also in sorted(spellings.items())]
    return "\n".join(lines) + "\n"


def _operators(tables: Path) -> Iterator[tuple[str, str]]:
    """(operator, family) of a platform's tables."""
    for table in sorted(tables.glob("*.yaml")):
        for name, entry in (yaml.safe_load(table.read_text(encoding="utf-8")) or {}).items():
            yield name, entry["family"]


def _families() -> Iterator[tuple[str, str]]:
    """(family, first sentence of its docstring) of every registered class."""
    for module in sorted(_OPS.glob("*.py")):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                text = (ast.get_docstring(node) or "").split("\n\n")[0]
                rule = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "register_distributed_op":
                        yield ast.literal_eval(decorator.args[0]), rule


def _literal(module: Path, name: str) -> dict[str, str]:
    """The value of a top-level assignment; nothing is imported."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets: Sequence[Any] = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value: dict[str, str] = ast.literal_eval(node.value)
                return value
    raise ValueError(f"{module} assigns no {name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 when ``--check`` finds another page."""
    parser = argparse.ArgumentParser(prog="python -m tools.op_names", description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="put the page into docs/op_names.md")
    mode.add_argument("--check", action="store_true", help="exit with 1 when the page there is another one")
    options = parser.parse_args(arguments)
    page = render()
    if options.write:
        _PAGE.write_text(page, encoding="utf-8")
    elif not options.check:
        print(page)
    elif not _PAGE.is_file() or _PAGE.read_text(encoding="utf-8") != page:
        print("docs/op_names.md is stale; run python -m tools.op_names --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
