"""The tables of measurements are those of the result files."""

from __future__ import annotations

import pytest

from benchmarks.page import PAGES, results, rewritten
from tests.docs.pages import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_generated(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == rewritten(text, results()), f"run python -m benchmarks.page, {name} is out of date"
