"""The statistics of all ranks, a block of tokens at a time: the exchange of one runs beside the arithmetic of the next.

The blocks are cut by the number of tokens alone, so that all ranks cut alike. What came of them is put together before
anything is merged: the numbers are those of one exchange, and so is the decision whether it was enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform.loss_statistics import Strategy, choose_strategy
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch._loss_exchange import MergedStatistics, Received, merge_statistics, start_exchange
from hyper_parallel.platform.torch._loss_rows import matrices
from hyper_parallel.platform.torch._loss_statistics import Exponentials, ShardStatistics, shard_statistics

__all__ = ["exchanged_statistics"]

_Found = tuple[ShardStatistics, Exponentials]


def exchanged_statistics(
    logits: torch.Tensor,
    dim: int,
    group: Group | None,
    blocks: int,
    *,
    owner: torch.Tensor | None,
    target_index: torch.Tensor,
    needed: torch.Tensor,
    class_weight: torch.Tensor | None,
    entropy: bool,
) -> tuple[MergedStatistics, Exponentials]:
    """:func:`shard_statistics` of these logits and :func:`merge_statistics`, in ``blocks`` blocks of tokens."""

    def statistics(x: torch.Tensor, dim: int, part: slice) -> _Found:
        return shard_statistics(
            x,
            dim,
            target_index=target_index[part],
            needed=needed[part],
            class_weight=class_weight,
            entropy=entropy,
        )

    tokens = len(target_index)
    if group is None or group.size == 1 or min(blocks, tokens) < 2:
        local, exponentials = statistics(logits, dim, slice(None))
        return merge_statistics(local, group, owner=owner), exponentials
    found: list[_Found] = []
    waiting: list[Callable[[], Received]] = []
    strategy: Strategy | None = None
    for block, pieces in _blocks(logits, dim, blocks):
        own = _joined([statistics(rows, 1, part) for part, rows in pieces])
        if strategy is None:  # by all there is to send, as without blocks
            strategy = choose_strategy(group.size, own[0].nbytes // (block.stop - block.start) * tokens)
        waiting.append(start_exchange(own[0], group, None if owner is None else owner[block], strategy))
        found.append(own)
    vectors, weight_sums = zip(*(wait() for wait in waiting))
    local, exponentials = _joined(found)
    received = torch.cat(vectors, -1), weight_sums[0]
    return merge_statistics(local, group, owner=owner, strategy=strategy, received=received), exponentials


def _blocks(logits: torch.Tensor, dim: int, count: int) -> Iterator[tuple[slice, list[tuple[slice, torch.Tensor]]]]:
    """The tokens of each block, and of the matrices ``[tokens, classes]`` that it consists of."""
    tokens = math.prod(logits.shape[:dim] + logits.shape[dim + 1 :])
    whole = [(first, rows) for first, (rows,) in matrices(dim, logits)]
    for start, stop in chunk_ranges(tokens, count):
        # without classes there is no matrix, and yet something to tell
        pieces = [] if whole else [(slice(start, stop), logits.new_empty((stop - start, 0)))]
        for first, rows in whole:
            low, high = max(start, first), min(stop, first + len(rows))
            if low < high:
                pieces.append((slice(low, high), rows[low - first : high - first]))
        if start < stop:
            yield slice(start, stop), pieces


def _joined(found: Sequence[_Found]) -> _Found:
    """Those of consecutive tokens as one."""
    if len(found) == 1:
        return found[0]

    def joined(*vectors: torch.Tensor | None) -> torch.Tensor | None:
        there = [vector for vector in vectors if vector is not None]
        return torch.cat(there) if there else None

    names = ("reference", "sum_exp", "target_logit", "shortfall", "mean")
    vectors = {name: joined(*(getattr(statistics, name) for statistics, _ in found)) for name in names}
    exponentials = (torch.cat(column) for column in zip(*(e for _, e in found)))
    return ShardStatistics(**vectors, weight_sum=found[0][0].weight_sum), Exponentials(*exponentials)  # type: ignore[arg-type]
