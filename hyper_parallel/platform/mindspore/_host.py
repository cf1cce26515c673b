"""Tensors and NumPy arrays over the same memory. On CPU much is faster, or only possible, in NumPy."""

from __future__ import annotations

from functools import cache
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.common import np_dtype
from numpy.typing import NDArray

__all__ = ["BFLOAT16", "as_float32", "bits_dtype", "on_cpu", "to_bits", "to_host", "to_tensor"]

Array = NDArray[Any]

BFLOAT16: np.dtype[Any] = np.dtype(np_dtype.bfloat16)
"""NumPy's bfloat16, which MindSpore brings along. It can be converted and viewed; for anything else it is not to be
used: there is no arithmetic, and joining an empty array crashes the interpreter."""


@cache
def on_cpu() -> bool:
    """Whether this process computes on CPU; settled when it is first asked, which a mesh comes before."""
    return bool(mindspore.get_context("device_target") == "CPU")


def to_host(x: Tensor) -> Array:
    """The values. Of a contiguous tensor on CPU this is its own memory: not to be written to."""
    array: Array = x.asnumpy()
    return array


def to_bits(x: Tensor) -> Array:
    """The values, bfloat16 as uint16: to be moved about and given to :func:`to_tensor` with the dtype."""
    host = to_host(x)
    return host.view(np.uint16) if host.dtype == BFLOAT16 else host


def to_tensor(array: Array, dtype: np.dtype[Any] | None = None) -> Tensor:
    """A tensor over the array's memory, which nobody else may write to any more; ``dtype`` reads its bits anew."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    return Tensor.from_numpy(array if dtype is None else array.view(dtype))


def as_float32(array: Array) -> Array:
    """float32 values of an array of 16-bit floats; others as they are."""
    if array.dtype == np.float16 or array.dtype == BFLOAT16:
        return array.astype(np.float32)
    return array


def bits_dtype(x: Tensor) -> np.dtype[Any] | None:
    """What :func:`to_tensor` needs to undo :func:`to_bits`."""
    return BFLOAT16 if str(x.dtype) == "BFloat16" else None
