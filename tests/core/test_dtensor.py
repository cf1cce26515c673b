"""DTensor as a tensor: construction, Python protocol, values, autograd, writing, errors, the cache."""

from __future__ import annotations

import pytest

from tests.core.remote import run

pytestmark = pytest.mark.platform("torch")

ANY_SIZE = (
    "making",
    "python_protocol",
    "values",
    "gradients",
    "writing",
    "optimizers",
    "recomputation",
    "skipping",
    "one_rank_mesh_dims",
)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ANY_SIZE)
def test_behaves_as_a_tensor(name: str, world_size: int) -> None:
    run("dtensor_workers", name, world_size, world_size=world_size)


@pytest.mark.contract("G4")
@pytest.mark.parametrize("world_size", [4])
def test_errors(world_size: int) -> None:
    run("dtensor_workers", "errors", world_size, world_size=world_size)


@pytest.mark.contract("I4")
@pytest.mark.parametrize("world_size", [2])
def test_cache(world_size: int) -> None:
    run("dtensor_workers", "cache", world_size, world_size=world_size)
