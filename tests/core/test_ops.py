"""Operators on DTensors: every combination of placements equals one device, or is refused on all ranks."""

from __future__ import annotations

import pytest

from tests.core import op_workers
from tests.harness import run_distributed

pytestmark = pytest.mark.platform("torch")


@pytest.mark.contract("G4")
@pytest.mark.parametrize("theme", ["elementwise", "reductions", "matmul", "views"])
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_operators(theme: str, mesh_shape: tuple[int, ...]) -> None:
    size = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    counts = run_distributed(op_workers.check_theme, theme, mesh_shape, world_size=size, timeout=120)
    assert all(c == counts[0] for c in counts)
    assert all(c.get("right") for c in counts[0].values())
