"""The site's list of pages and its reference are complete. That it builds, and that links lead somewhere: make docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import hyper_parallel
from hyper_parallel import trainer
from tests.docs.pages import ROOT, all_pages

DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
GUIDE = {
    "when to enable it": ("guide/loss_parallel.md", "## When to enable it"),
    "the last layer": ("guide/loss_parallel.md", "## The last layer"),
    "the Trainer": ("guide/trainer.md", "## From a script"),
    "TorchTitan": ("guide/from_torchtitan.md", "## The loss and the last layer"),
    "MindFormers": ("guide/from_mindformers.md", "## The loss"),
    "operator names of PyTorch": ("op_names.md", "## PyTorch"),
    "operator names of MindSpore": ("op_names.md", "## MindSpore"),
}


def listed(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from listed(inner)


def documented() -> list[str]:
    """The objects that the pages of the reference show."""
    pages = sorted((DOCS / "api").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (.+)$", page.read_text(encoding="utf-8"), re.M)]


def test_every_page_is_listed_once() -> None:
    assert sorted(listed(SITE["nav"])) == sorted(p.name.removeprefix("docs/") for p in all_pages() if "docs/" in p.name)


def test_every_public_name_is_in_the_reference_once() -> None:
    ours = {f"{module}.{name}" for name, module in hyper_parallel._EXPORTS.items()}
    defined = {name.rpartition(".")[2] for name in documented()}
    assert {name.rpartition(".")[2] for name in ours} <= defined
    assert set(trainer._EXPORTS) <= defined
    assert len(documented()) == len(set(documented()))


@pytest.mark.contract("D1")
@pytest.mark.parametrize("topic", GUIDE)
def test_the_guide_speaks_of(topic: str) -> None:
    page, heading = GUIDE[topic]
    assert heading in (DOCS / page).read_text(encoding="utf-8").splitlines()
    assert page in set(listed(SITE["nav"]))
