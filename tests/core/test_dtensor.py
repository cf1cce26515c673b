"""DTensor as a tensor: construction, Python protocol, values, autograd, writing, errors, the cache."""

from __future__ import annotations

import pytest

from tests.core.remote import run

pytestmark = pytest.mark.platform("torch")

ANY_SIZE = {
    "dtensor_workers": ["making", "python_protocol", "values", "skipping", "one_rank_mesh_dims"],
    "autograd_workers": ["gradients", "writing", "optimizers", "recomputation"],
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in ANY_SIZE.items() for name in names])
def test_behaves_as_a_tensor(module: str, name: str, world_size: int) -> None:
    run(module, name, world_size, world_size=world_size)


@pytest.mark.contract("G4")
@pytest.mark.parametrize("world_size", [4])
def test_errors(world_size: int) -> None:
    run("dtensor_workers", "errors", world_size, world_size=world_size)


@pytest.mark.contract("I4")
@pytest.mark.parametrize("world_size", [2])
def test_cache(world_size: int) -> None:
    run("dtensor_workers", "cache", world_size, world_size=world_size)
