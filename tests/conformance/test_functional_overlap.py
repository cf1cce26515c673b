"""The loss called by name in blocks of tokens, whose exchanges overlap with arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.groups import on_groups
from tests.conformance.loss_calls import mesh_of
from tests.conformance.test_functional import OPTIONS, Call, check
from tests.harness import run_distributed, this_rank

pytestmark = pytest.mark.contract("G1")


@on_groups(1, 2, 4)
def test_overlap(platform: str, world_size: int) -> None:
    """The same in any number of blocks."""
    check(platform, world_size, Call(options={"overlap_blocks": 2}, reduction="none", more=True))
    everything = OPTIONS["everything"].options | {"overlap_blocks": 4, "validate": True}
    check(platform, world_size, Call((2, 3, 9), options=everything, weighted=True, more=True))
    check(platform, world_size, Call((3, 3), options={"overlap_blocks": 9}, dtype="float64"))


@pytest.mark.contract("E1")
@on_groups(2)
@pytest.mark.parametrize(
    ("blocks", "kind", "expected"),
    [
        (0, "ValueError", "on rank 1 of the class group, overlap_blocks is 0; expected a number of blocks, 1 or more"),
        (2.5, "ValueError", "overlap_blocks is 2.5; expected"),
        (2, "LossParallelLayoutError", "overlap_blocks differs between the ranks of the class group: '2' on rank 1"),
    ],
)
def test_bad_overlap(platform: str, world_size: int, blocks: Any, kind: str, expected: str) -> None:
    """Wrong on one rank: the same error on both."""
    for found, message in run_distributed(
        bad_overlap, blocks, platform=platform, world_size=world_size, expect_error=True
    ):
        assert found == kind and expected in message


def bad_overlap(blocks: Any) -> None:
    """In a worker: rank 0 asks for one block."""
    from hyper_parallel import vocab_parallel_cross_entropy

    adapter = this_adapter()
    vocab_parallel_cross_entropy(
        adapter.tensor(np.zeros((3, 2)), "float32"),
        adapter.tensor(np.zeros(3), "int64"),
        mesh_of((2,), ("tp",))["tp"],
        validate=True,
        overlap_blocks=blocks if this_rank() else 1,
    )
