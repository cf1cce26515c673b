"""constraints.txt: pip finds nothing to install where one package is pinned twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_every_package_is_pinned_once(python: str) -> None:
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    names = [p.name.lower() for p in pins if p.marker is None or p.marker.evaluate({"python_version": python})]
    assert sorted(names) == sorted(set(names))
    assert all(str(p.specifier).startswith("==") for p in pins)
