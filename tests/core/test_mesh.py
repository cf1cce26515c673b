"""Meshes and layouts, and conversion from and to PyTorch's own."""

from __future__ import annotations

import pytest

from tests.core.remote import run

pytestmark = [pytest.mark.platform("torch"), pytest.mark.contract("G4")]


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("name", ["meshes", "adopted", "native_tensors"])
def test_mesh(name: str, world_size: int) -> None:
    run("mesh_workers", name, world_size=world_size)


@pytest.mark.parametrize("world_size", [1])
def test_layouts(world_size: int) -> None:
    run("mesh_workers", "layouts", world_size=world_size)
