"""Every collective on ``AllReduce(sum)``, for MindSpore's CPU backend, which has no other on sub-groups.

A gather is a sum in which each member fills a slot of its own and leaves the others zero: exact, but that -0.0 arrives
as 0.0. Dtypes that AllReduce does not take travel as float32: 16-bit floats and small integers fit into it, wider
numbers are cut into 16-bit limbs that do. Everything but the sum itself is NumPy on the tensors' own memory, so nothing
is recorded for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from hyper_parallel.platform.mindspore._host import as_float32, bits_dtype, to_bits, to_host, to_tensor
from hyper_parallel.platform.platform import Group

__all__ = [
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all_uneven",
    "broadcast",
    "empty_or_alone",
    "reduce_scatter_uneven",
]

Array = NDArray[Any]

_EXTREMA: dict[str, np.ufunc] = {"max": np.maximum, "min": np.minimum}


def empty_or_alone(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A copy of ``x`` as ``shape``; zeros where that is larger. For calls in which nothing has to be sent."""
    bits = to_bits(x)
    if bits.size == math.prod(shape):
        return to_tensor(bits.reshape(tuple(shape)).copy(), bits_dtype(x))
    return to_tensor(np.zeros(tuple(shape), bits.dtype), bits_dtype(x))


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """Elementwise ``op``; 16-bit floats are summed in float32 and rounded once, integers wrap around."""
    host = to_host(x)
    values = as_float32(host)
    if values.dtype == np.float32 and op == "sum":
        return to_tensor(_sum(values, group).astype(host.dtype))
    gathered = _gather(values, group)
    if op != "sum":
        return to_tensor(_EXTREMA[op].reduce(gathered).astype(host.dtype))
    total = gathered.any(0) if host.dtype == np.bool_ else gathered.sum(0, dtype=host.dtype)
    return to_tensor(total)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """``[P, *x.shape]``."""
    return to_tensor(_gather(to_bits(x), group), bits_dtype(x))


def all_gather_uneven(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Concatenate along ``dim``."""
    bits = to_bits(x)
    whole = np.zeros((*bits.shape[:dim], sum(sizes), *bits.shape[dim + 1 :]), bits.dtype)
    whole[_own(dim, sizes, group)] = bits
    return to_tensor(_merge(whole, group), bits_dtype(x))


def reduce_scatter_uneven(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """All-reduce, then keep a piece."""
    whole = all_reduce(x, "sum", group)
    return to_tensor(to_bits(whole)[_own(dim, sizes, group)].copy(), bits_dtype(x))


def all_to_all_uneven(chunks: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: Group) -> list[Tensor]:
    """Everybody sees everything and keeps its own. Two all-reduces: the sizes, then the data."""
    flat = [to_bits(c).reshape(-1) for c in chunks]
    sizes = _gather(np.array([f.size for f in flat], np.int64), group)  # [from, to]
    ends = np.cumsum(sizes.ravel()).reshape(sizes.shape)
    starts = ends - sizes
    whole = np.zeros(int(sizes.sum()), flat[0].dtype)
    for receiver, values in enumerate(flat):
        whole[int(starts[group.rank, receiver]) : int(ends[group.rank, receiver])] = values
    if whole.size:
        whole = _merge(whole, group)
    received = []
    for sender, shape in enumerate(shapes):
        piece = whole[int(starts[sender, group.rank]) : int(ends[sender, group.rank])]
        received.append(to_tensor(piece.reshape(shape).copy(), bits_dtype(chunks[0])))
    return received


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """The sum of the source's tensor and everybody else's zeros."""
    bits = to_bits(x)
    return to_tensor(_merge(bits if group.rank == src else np.zeros_like(bits), group), bits_dtype(x))


def _own(dim: int, sizes: Sequence[int], group: Group) -> tuple[slice, ...]:
    start = sum(sizes[: group.rank])
    return (slice(None),) * dim + (slice(start, start + sizes[group.rank]),)


def _gather(array: Array, group: Group) -> Array:
    slots = np.zeros((group.size, *array.shape), array.dtype)
    slots[group.rank] = array
    return _merge(slots, group)


def _merge(slots: Array, group: Group) -> Array:
    """The sum of arrays of which at most one is not zero at any place: exact for every dtype.

    Two bytes travel as one float32 number.
    """
    if slots.dtype == np.float32:
        return _sum(slots, group)
    raw = np.ascontiguousarray(slots).reshape(-1).view(np.uint8)
    if raw.size % 2:
        raw = np.append(raw, np.uint8(0))
    merged = _sum(raw.view(np.uint16).astype(np.float32), group).astype(np.uint16).view(np.uint8)
    return merged[: slots.nbytes].view(slots.dtype).reshape(slots.shape)


def _sum(values: Array, group: Group) -> Array:
    """AllReduce(sum) of float32 numbers."""
    operator = group.handle.operator("AllReduce", "sum")
    return to_host(operator(to_tensor(values)))
