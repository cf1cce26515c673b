"""Random operators: one stream for all ranks, the same numbers where a tensor is replicated."""

from __future__ import annotations

import pytest

from tests.core.remote import run

pytestmark = pytest.mark.platform("torch")


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize(
    "name", ["masks", "partial_terms", "nothing_drawn", "refused", "different_generators", "shard_indices"]
)
def test_random(name: str, world_size: int) -> None:
    run("random_workers", name, world_size=world_size)


@pytest.mark.parametrize("world_size", [1])
def test_one_rank(world_size: int) -> None:
    run("random_workers", "one_rank", world_size=world_size)
