"""MindSpore's operators on DTensors: every combination of placements equals one device, or is refused on all ranks."""

from __future__ import annotations

import pytest

from tests.mindspore.remote import run

pytestmark = pytest.mark.platform("mindspore")


@pytest.mark.contract("G4")
@pytest.mark.parametrize("theme", ["elementwise", "reductions", "matmul", "views", "lookup"])
@pytest.mark.parametrize(
    ("mesh_shape", "world_size"),
    [((1,), 1), ((2,), 2), ((4,), 4), ((2, 2), 4)],
    ids=["alone", "two", "four", "two_by_two"],
)
def test_operators(theme: str, mesh_shape: tuple[int, ...], world_size: int) -> None:
    counts = run("op_cases", "check_theme", theme, mesh_shape, world_size=world_size, timeout=180)
    assert all(c == counts[0] for c in counts)
    assert all(c.get("right") for c in counts[0].values())
