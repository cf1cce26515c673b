"""The largest or smallest values along a dim, with their places."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, _no_grad, ops

from hyper_parallel.platform.mindspore._host import as_float32, on_cpu, to_host, to_tensor

__all__ = ["extremum"]


def extremum(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Values along ``dim`` (kept, with size 1) and the first index of each, as int64. NaN counts as both."""
    if on_cpu() or x.shape[dim] == 0:
        return _on_host(x, dim, largest)
    with _no_grad():
        values, index = (ops.max if largest else ops.min)(x, dim, keepdims=True)
        return values, index.astype(mindspore.int64)


def _on_host(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    host = to_host(x)
    values = as_float32(host)
    if values.shape[dim] == 0:
        shape = (*values.shape[:dim], 1, *values.shape[dim + 1 :])
        worst = np.full(shape, _worst(values.dtype, largest), values.dtype)
        return to_tensor(worst.astype(host.dtype)), to_tensor(np.zeros(shape, np.int64))
    index = (np.argmax if largest else np.argmin)(values, dim, keepdims=True).astype(np.int64)
    return to_tensor(np.take_along_axis(values, index, dim).astype(host.dtype)), to_tensor(index)


def _worst(dtype: np.dtype[Any], largest: bool) -> float | int:
    if dtype.kind == "f":
        return -np.inf if largest else np.inf
    if dtype == np.bool_:
        return not largest
    limits = np.iinfo(dtype)
    return int(limits.min if largest else limits.max)
