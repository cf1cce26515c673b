"""NumPy values that every rank makes for itself, and the pieces that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyper_parallel.core.shard_spec import chunk_ranges


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Normally distributed float64 values, the same on every rank."""
    return np.random.default_rng(seed).standard_normal(shape)


def pieces(array: np.ndarray, dim: int, ranks: int, sizes: Sequence[int] | None = None) -> list[np.ndarray]:
    """What each rank holds of `array` cut along `dim`: `torch.chunk` pieces, or pieces of `sizes`."""
    if sizes is None:
        bounds = [stop for _, stop in chunk_ranges(array.shape[dim], ranks)]
    else:
        bounds = list(np.cumsum(sizes))
    return np.split(array, bounds[:-1], dim)
