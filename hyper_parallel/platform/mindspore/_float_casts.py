"""Casts between the dtypes of checkpoint files and of parameters, in NumPy.

NumPy has no bfloat16 to compute with, so it is carried as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["cast_into", "host_dtype"]

Array = NDArray[Any]

_BFLOAT16 = "bfloat16"
_NAN = np.uint16(0x7FC0)


def host_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that elements of ``name`` are carried in: uint16 for ``"bfloat16"``."""
    return np.dtype(np.uint16 if name == _BFLOAT16 else name)


def cast_into(target: Array, target_dtype: str, values: Array, dtype: str) -> None:
    """Store values, rounded once, to nearest with ties to even.

    Args:
        target: of ``host_dtype(target_dtype)``, and as many elements as ``values``.
        target_dtype: as NumPy spells it, or ``"bfloat16"``.
        values: of ``host_dtype(dtype)``.
        dtype: of the values.
    """
    if dtype == target_dtype:
        target[...] = values
        return
    if dtype == _BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if target_dtype == _BFLOAT16:
            target[...] = _to_bfloat16(values.astype(np.float32))
        else:
            target[...] = values


def _to_bfloat16(values: Array) -> Array:
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = _NAN
    return rounded
