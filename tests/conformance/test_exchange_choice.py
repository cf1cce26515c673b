"""One all-gather or two all-reduces: every backend chooses alike, in groups larger than can be started here too."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.groups import on_groups
from tests.harness import run_distributed

pytestmark = pytest.mark.contract("K3")


@on_groups(1)
@pytest.mark.parametrize(
    ("ranks", "small", "expected"),
    [
        pytest.param(8, 0, {"all_gather"}, id="8 ranks, much to send"),
        pytest.param(9, 1 << 24, {"all_gather"}, id="9 ranks, little to send"),
        # 9 ranks send three numbers of 4 bytes for each of 5 tokens
        pytest.param(9, 9 * 3 * 5 * 4, {"all_gather"}, id="9 ranks, as much as may be gathered"),
        pytest.param(9, 9 * 3 * 5 * 4 - 1, {"all_reduce"}, id="9 ranks, a byte more"),
    ],
)
def test_choice(platform: str, world_size: int, ranks: int, small: int, expected: set[str]) -> None:
    """The collectives of one forward; the other ranks are imagined to hold the same logits."""
    assert run_distributed(collectives_of, ranks, small, platform=platform, world_size=world_size) == [expected]


def collectives_of(ranks: int, small: int) -> set[str]:
    """In a worker: with ``small`` bytes as what larger groups may gather."""
    from hyper_parallel import get_platform
    from hyper_parallel.core.shard_spec import chunk_ranges
    from hyper_parallel.platform import loss_statistics
    from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
    from hyper_parallel.platform.platform import Group

    adapter, platform = this_adapter(), get_platform()
    module = importlib.import_module(f"hyper_parallel.platform.{platform.name}.collectives")
    ranges = chunk_ranges(4 * ranks, ranks)
    shard = ClassShard(0, 4, 4 * ranks, Group(tuple(range(ranks)), None, 0), ranges)
    called: set[str] = set()

    def all_gather(x: Any, group: Group) -> Any:
        called.add("all_gather")
        return platform.stack([x] * group.size)

    def all_reduce(x: Any, op: str, group: Group) -> Any:
        called.add("all_reduce")
        return x

    logits = adapter.tensor(np.arange(20.0).reshape(5, 4) % 7, "float32")
    target = adapter.tensor(np.zeros(5, np.int64), "int64")
    with (
        mock.patch.multiple(module, all_gather=all_gather, all_reduce=all_reduce),
        mock.patch.object(loss_statistics, "_SMALL_GATHER", small),
    ):
        platform.loss_kernels.cross_entropy(logits, 1, target, shard, None, LossOptions(validate=False))
    return called
