"""The largest elements of each row on the host, with a fixed order among equals."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.platform.mindspore._host import as_float32

__all__ = ["largest"]

Array = NDArray[Any]

_CHUNK_BYTES = 1 << 25
"""Of the 64-bit keys of a chunk of rows."""


def largest(x: Array, k: int) -> tuple[Array, Array]:
    """The ``k`` largest of the last dim, descending, and their places; the first one among equals first.

    Sorted are keys that differ: the value's bits, in an order of integers that is that of the values, above the place
    counted from the end. Values of 64 bits are sorted stably themselves.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size) if x.size else x.reshape(int(np.prod(x.shape[:-1])), size)
    index = np.empty((len(rows), k), np.int64)
    step = max(1, _CHUNK_BYTES // max(8 * size, 1))
    for start in range(0, len(rows) if k else 0, step):
        part = as_float32(rows[start : start + step])
        index[start : start + step] = _by_sorting(part, k) if part.dtype == np.float64 else _by_keys(part, k)
    # bfloat16 has no arithmetic in NumPy; indexing moves its bits
    values = rows[np.arange(len(rows))[:, None], index]
    shape = (*x.shape[:-1], k)
    return values.reshape(shape), index.reshape(shape)


def _by_keys(rows: Array, k: int) -> Array:
    size = rows.shape[1]
    bits = (rows + np.float32(0.0)).view(np.int32)
    ordered = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    ordered = np.where(np.isnan(rows), np.iinfo(np.int32).max, ordered)
    keys = (ordered.astype(np.int64) << 32) + np.arange(size - 1, -1, -1)
    if k < size:
        keys = np.partition(keys, size - k, axis=1)[:, size - k :]
    keys = -np.sort(-keys, axis=1)
    return size - 1 - (keys & 0xFFFFFFFF)


def _by_sorting(rows: Array, k: int) -> Array:
    flipped = np.where(np.isnan(rows), -np.inf, -rows)
    first = np.lexsort((flipped, ~np.isnan(rows)), axis=1)  # stable; NaN before plus infinity
    return first[:, :k]
