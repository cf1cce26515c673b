"""Redistribution between any two placements: values, gradients, second derivatives."""

from __future__ import annotations

import pytest

from tests.core import redistribute_workers
from tests.harness import run_distributed

pytestmark = pytest.mark.platform("torch")


@pytest.mark.contract("G4")
@pytest.mark.parametrize(
    ("mesh_shape", "world_size"),
    [((1,), 1), ((2,), 2), ((3,), 3), ((4,), 4), ((2, 2), 4), ((4, 1), 4), ((1, 2, 2), 4)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 2), (0, 3), (7,)], ids=str)
def test_every_pair(mesh_shape: tuple[int, ...], world_size: int, shape: tuple[int, ...]) -> None:
    tried = run_distributed(
        redistribute_workers.every_pair, mesh_shape, shape, world_size=world_size, timeout=60
    )
    assert len(set(tried)) == 1


@pytest.mark.parametrize(("mesh_shape", "world_size"), [((2,), 2), ((2, 2), 4)], ids=str)
def test_second_derivatives(mesh_shape: tuple[int, ...], world_size: int) -> None:
    run_distributed(redistribute_workers.second_derivatives, mesh_shape, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_extrema(world_size: int) -> None:
    run_distributed(redistribute_workers.extrema, (world_size,), world_size=world_size)


@pytest.mark.parametrize("world_size", [4])
def test_errors(world_size: int) -> None:
    run_distributed(redistribute_workers.errors, world_size=world_size)
