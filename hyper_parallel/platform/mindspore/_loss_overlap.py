"""The statistics of all ranks, a block of tokens at a time: the exchange of one runs beside the arithmetic of the next.

The blocks are cut by the number of tokens alone, so that all ranks cut alike, and what came of them is put together
before anything is merged. On CPU, where no collective is asynchronous, there is one block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform.loss_statistics import Strategy, choose_strategy
from hyper_parallel.platform.mindspore._loss_exchange import (
    MergedStatistics,
    Received,
    ShardStatistics,
    Vector,
    merge_statistics,
    start_exchange,
)
from hyper_parallel.platform.platform import Group

__all__ = ["exchanged_statistics"]


def exchanged_statistics(
    route: Any,
    x: Any,
    dim: int,
    group: Group | None,
    blocks: int,
    *,
    owner: Vector | None,
    target_index: Vector,
    needed: Vector,
    class_weight: Vector | None,
    entropy: bool,
) -> tuple[MergedStatistics, Vector]:
    """The ranks' statistics of each token, and the largest of its logits here; in ``blocks`` blocks of tokens."""

    def statistics(x: Any, dim: int, index: Vector, needed: Vector) -> ShardStatistics:
        maximum, sum_exp, shortfall, mean = route.row_statistics(x, dim, needed, class_weight, entropy)
        weight_sum = None
        if class_weight is not None:  # MindSpore's sum of nothing is whatever was in memory
            weight_sum = class_weight.sum() if class_weight.shape[0] else route.full(1, 0.0, class_weight.dtype)
        return ShardStatistics(maximum, sum_exp, route.at_index(x, dim, index), shortfall, weight_sum, mean)

    tokens = target_index.shape[0]
    if route.on_host or group is None or group.size == 1 or min(blocks, tokens) < 2:
        local = statistics(x, dim, target_index, needed)
        return merge_statistics(route, local, group, owner=owner), local.reference
    found: list[ShardStatistics] = []
    waiting: list[Callable[[], Received]] = []
    strategy: Strategy | None = None
    ranges = [(start, stop) for start, stop in chunk_ranges(tokens, blocks) if start < stop]
    for (start, stop), rows in zip(ranges, route.row_blocks(x, dim, ranges)):
        own = statistics(rows, 1, target_index[start:stop], needed[start:stop])
        if strategy is None:  # by all there is to send, as without blocks
            strategy = choose_strategy(group.size, own.nbytes // (stop - start) * tokens)
        waiting.append(start_exchange(route, own, group, strategy))
        found.append(own)
    columns, weights = zip(*(wait() for wait in waiting))
    received = [route.concat(list(column), -1) for column in zip(*columns)], weights[0]
    local = _joined(route, found)
    return merge_statistics(route, local, group, strategy=strategy, received=received), local.reference


def _joined(route: Any, found: list[ShardStatistics]) -> ShardStatistics:
    """Those of consecutive tokens as one."""
    names = ("reference", "sum_exp", "target_logit", "shortfall", "mean")
    parts = {name: [getattr(one, name) for one in found] for name in names}
    vectors = {name: None if part[0] is None else route.concat(part) for name, part in parts.items()}
    return ShardStatistics(**vectors, weight_sum=found[0].weight_sum)
