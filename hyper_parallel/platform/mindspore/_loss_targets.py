"""Where each token's target stands among this rank's classes."""

from __future__ import annotations

import math
from typing import Any

import mindspore
import numpy as np

from hyper_parallel.platform.loss_kernels import ClassShard
from hyper_parallel.platform.loss_statistics import ELSEWHERE, IGNORED

__all__ = ["masked", "place_targets", "target_owner"]

Vector = Any
"""One number a token: a NumPy array or a tensor, as the route has it."""


def place_targets(
    route: Any, labels: Vector, shard: ClassShard, weights: Vector | None, ignore_index: int, dtype: Any
) -> tuple[Vector, Vector]:
    """Where each target's class is among the local ones (int32), and ``w_y``, 0 where ignored."""
    ignored = labels == ignore_index
    here = (labels >= shard.start) & (labels < shard.stop)
    index = route.where(here, labels - shard.start, ELSEWHERE)
    index = route.cast(route.where(ignored, IGNORED, index), np.int32 if route.on_host else mindspore.int32)
    if weights is None:
        return index, route.cast(labels != ignore_index, dtype)
    picked = route.take(weights, route.clip(labels, 0, max(shard.num_classes - 1, 0)))
    return index, route.cast(route.where(ignored, 0.0, picked), dtype)


def masked(route: Any, x: Vector, kept: Vector, outside: Vector | None, dtype: Any) -> Vector:
    """``x`` where kept, else 0; NaN outside."""
    x = route.where(kept, x, 0.0)
    if outside is not None:
        x = route.where(outside, math.nan, x)
    return route.cast(x, dtype)


def target_owner(labels: np.ndarray, shard: ClassShard) -> np.ndarray | None:
    """Per token the member of the class group that holds its class, -1 for none; None where not known."""
    if shard.ranges is None:
        return None
    stops = np.array([stop for _, stop in shard.ranges])
    owner = np.searchsorted(stops, labels, side="right")
    return np.where((labels >= 0) & (labels < shard.num_classes), owner, -1)
