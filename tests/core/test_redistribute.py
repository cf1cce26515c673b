"""Redistribution between any two placements: values, gradients, second derivatives."""

from __future__ import annotations

import pytest

from tests.core.remote import run

pytestmark = pytest.mark.platform("torch")

MESHES = [((1,), 1), ((2,), 2), ((3,), 3), ((4,), 4), ((2, 2), 4), ((4, 1), 4), ((1, 2, 2), 4)]
SHAPES = [(4, 6), (5, 3), (1, 2), (0, 3), (7,)]


@pytest.mark.contract("G4")
@pytest.mark.parametrize(("mesh_shape", "world_size"), MESHES, ids=str)
def test_every_pair(mesh_shape: tuple[int, ...], world_size: int) -> None:
    run("redistribute_workers", "every_pair", mesh_shape, SHAPES, world_size=world_size)


@pytest.mark.parametrize(("mesh_shape", "world_size"), [((2,), 2), ((2, 2), 4)], ids=str)
def test_second_derivatives(mesh_shape: tuple[int, ...], world_size: int) -> None:
    run("redistribute_workers", "second_derivatives", mesh_shape, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_extrema(world_size: int) -> None:
    run("redistribute_workers", "extrema", (world_size,), world_size=world_size)


@pytest.mark.parametrize("world_size", [4])
def test_errors(world_size: int) -> None:
    run("redistribute_workers", "errors", world_size=world_size)
