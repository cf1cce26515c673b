"""The oracle (NumPy float64), roundings, cuts, and the one place where tolerances stand. Imports no framework."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["assert_close", "local_slices", "reference", "round_to"]


def _load() -> ModuleType:
    """The reference by its file: importing it as a part of its package would settle on a framework."""
    path = Path(__file__).parents[2] / "hyper_parallel" / "loss_parallel" / "reference.py"
    spec = importlib.util.spec_from_file_location("conformance_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _load()

# The largest relative error of one rounding to nearest, and the largest absolute one (of a subnormal result).
_ROUNDING = {"float64": (0.0, 0.0), "float32": (0.0, 0.0), "bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23}


def round_to(array: Any, dtype: str) -> np.ndarray:
    """Values that ``dtype`` can hold, as float64: float16, bfloat16, float32 to nearest (even)."""
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
        return np.where(np.isfinite(np.asarray(array, np.float32)), rounded, array).astype(np.float64)
    return np.asarray(array, dtype).astype(np.float64)


def local_slices(
    shape: Sequence[int], mesh: Sequence[int], shards: Sequence[int | None], rank: int
) -> tuple[slice, ...]:
    """What ``rank`` holds of a tensor whose dim ``shards[m]`` is cut over mesh dim m, outer mesh dims first."""
    coordinate = np.unravel_index(rank, tuple(mesh))
    ranges = [(0, size) for size in shape]
    for parts, dim, position in zip(mesh, shards, coordinate):
        if dim is None:
            continue
        start, stop = ranges[dim]
        step = -(-(stop - start) // parts)
        ranges[dim] = (min(start + step * position, stop), min(start + step * (position + 1), stop))
    return tuple(slice(start, stop) for start, stop in ranges)


def assert_close(actual: Any, expected: Any, dtype: str, what: str = "", *, scale: float = 1.0) -> None:
    """``actual``, of ``dtype``, is ``expected`` (float64) to the promised precision.

    fp32: 1e-5 relative; half precision: one rounding more. Numbers near 0 that are differences of numbers of size
    ``scale`` cannot be told apart closer than a few units of the precision that they are computed in.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    epsilon = _EPSILON["float64" if dtype == "float64" else "float32"]
    relative, absolute = _ROUNDING[dtype]
    finite = np.isfinite(expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    size = np.abs(np.where(finite, expected, 0.0))
    allowed = size * (relative + (1e-12 if dtype == "float64" else 1e-5)) + absolute + 4 * epsilon * scale
    with np.errstate(invalid="ignore"):
        good = same | (finite & (np.abs(actual - expected) <= allowed))
    if not good.all():
        worst = np.argwhere(~good)[0]
        raise AssertionError(
            f"{what}: {int((~good).sum())} of {good.size} values differ; the first at {worst.tolist()}: "
            f"{actual[tuple(worst)]!r}, expected {expected[tuple(worst)]!r}"
        )
