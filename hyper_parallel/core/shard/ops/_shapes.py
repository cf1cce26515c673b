"""Arithmetic on global shapes and dims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from numbers import Integral
from typing import Any

__all__ = ["broadcast_shape", "complete_shape", "flatten_ints", "normal_dim", "normal_dims"]


def normal_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front.

    Raises:
        IndexError: there is no such dim.
    """
    size = max(ndim, 1)
    if not -size <= dim < size:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return dim % size


def normal_dims(dims: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """Dims counted from the front; None and () mean all of them."""
    if dims is None:
        return tuple(range(ndim))
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    found = tuple(normal_dim(d, ndim) for d in listed) or tuple(range(ndim))
    if len(set(found)) != len(found):
        raise ValueError(f"dims {listed} name a dim twice")
    return found if ndim else ()


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that NumPy broadcasting gives.

    Raises:
        ValueError: sizes that differ and are not 1.
    """
    out = [1] * max((len(s) for s in shapes), default=0)
    for shape in shapes:
        for i, size in enumerate(shape, len(out) - len(shape)):
            if size != 1:
                if out[i] not in (1, size):
                    raise ValueError(f"shapes {tuple(map(tuple, shapes))} cannot be broadcast together")
                out[i] = size
    return tuple(out)


def flatten_ints(values: Any) -> tuple[int, ...]:
    """Sizes or dims given as ``f(2, 3)`` or as ``f((2, 3))``."""
    if isinstance(values, Integral):
        return (int(values),)
    if len(values) == 1 and not isinstance(values[0], Integral):
        return tuple(int(v) for v in values[0])
    return tuple(int(v) for v in values)


def complete_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """A shape in which one size may be -1, completed to ``numel`` elements.

    Raises:
        ValueError: it cannot be.
    """
    known = prod(s for s in shape if s != -1)
    out = tuple(shape)
    if list(shape).count(-1) == 1 and known and numel % known == 0:
        out = tuple(numel // known if s == -1 else s for s in shape)
    if -1 in out or prod(out) != numel:
        raise ValueError(f"shape {tuple(shape)} is invalid for {numel} elements")
    return out
