"""The compiled kernels on NumPy's arrays, which MindSpore's tensors on CPU are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.platform.mindspore._host import BFLOAT16
from hyper_parallel.platform.native.rows import Matrix, RowKernels, row_kernels

__all__ = ["CompiledRows", "compiled_rows"]

Array = NDArray[Any]

_NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", BFLOAT16: "bfloat16"}


def compiled_rows(dim: int, *arrays: Array) -> CompiledRows | None:
    """The kernels for matrices of these arrays; None: do without.

    They take any dtype but float64; the classes, in ``dim``, have to lie next to each other.
    """
    kernels = row_kernels()
    if kernels is None or any(
        a.dtype not in _NAMES or (a.shape[dim] > 1 and a.strides[dim] != a.itemsize) for a in arrays
    ):
        return None
    return CompiledRows(kernels)


class CompiledRows:
    """On one thread, as NumPy."""

    def __init__(self, kernels: RowKernels) -> None:
        self._kernels = kernels

    def statistics(self, rows: Array, needed: Array | None, maximum: Array, sum_exp: Array) -> None:
        """Write per row of ``[tokens, classes]`` the maximum, and the sum of exponentials relative to it (0 for -inf).

        Rows that are not ``needed`` are not read.
        """
        wanted = None if needed is None else np.ascontiguousarray(needed)
        self._kernels.statistics(
            *(_matrix(rows), None if wanted is None else wanted.ctypes.data, maximum.ctypes.data, sum_exp.ctypes.data)
        )

    def gradients(self, rows: Array, anchor: Array, factor: Array, out: Array) -> None:
        """Write ``exp(rows - anchor) factor``, rounded once; 0 in rows of factor 0. ``out`` may be ``rows``."""
        anchor, factor = (np.ascontiguousarray(v, np.float32) for v in (anchor, factor))
        self._kernels.gradients(_matrix(rows), anchor.ctypes.data, factor.ctypes.data, _matrix(out))


def _matrix(x: Array) -> Matrix:
    return Matrix(x.ctypes.data, x.strides[0], x.shape[0], x.shape[1], _NAMES[x.dtype])
