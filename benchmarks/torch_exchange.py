"""The loss's exchange by each strategy, measured: ``python -m benchmarks exchange``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import Clock, interleave
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch._loss_exchange import merge_statistics
from hyper_parallel.platform.torch._loss_statistics import ShardStatistics

__all__ = ["run"]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of tokens and microseconds a strategy."""
    return [_row(tokens, 10 if options["quick"] else 30) for tokens in (256, 4096, 65536)]


def _row(tokens: int, repetitions: int) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = Group(tuple(range(size)), dist.group.WORLD, rank)
    generator = torch.Generator().manual_seed(rank)
    maximum, sums = torch.rand(2, tokens, generator=generator).unbind(0)
    owner = torch.arange(tokens) % size
    target = torch.where(owner == rank, maximum - 1.0, 0.0)
    local = ShardStatistics(maximum, 1.0 + sums, target)
    ways: dict[str, Callable[[], object]] = {
        "gather of 8 bytes a token": partial(merge_statistics, local, group, owner=owner, strategy="gather"),
        "gather of 12 bytes a token": partial(merge_statistics, local, group, strategy="gather"),
        "MAX and SUM": partial(merge_statistics, local, group, strategy="reduce"),
    }

    def timed(way: Callable[[], object]) -> dict[str, float]:
        clock = Clock()
        way()
        return {"seconds": clock.lap()}

    times = interleave({name: partial(timed, way) for name, way in ways.items()}, repetitions, dist.barrier)
    return {"ranks": size, "tokens": tokens, **{f"{name}, us": round(1e6 * t["seconds"]) for name, t in times.items()}}
