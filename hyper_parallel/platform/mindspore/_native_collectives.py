"""Collectives on MindSpore's own operators, for devices that have them on sub-groups (Ascend)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, _no_grad, ops

from hyper_parallel.platform.platform import Group

__all__ = [
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all_uneven",
    "broadcast",
    "reduce_scatter_uneven",
    "start_all_gather",
    "start_all_reduce",
]


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """One AllReduce; truth values as integers."""
    with _no_grad():
        wire = x.astype(mindspore.int32) if x.dtype == mindspore.bool_ else x
        return group.handle.operator("AllReduce", op)(wire.contiguous()).astype(x.dtype)


def start_all_reduce(x: Tensor, op: str, group: Group) -> Callable[[], Tensor]:
    """One asynchronous AllReduce in the memory of ``x``; calling the result waits for it."""
    with _no_grad():
        own = x.contiguous()
        work = group.handle.start_all_reduce(own, op)
    return lambda: _waited(work, own)


def start_all_gather(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """One asynchronous AllGather of a vector, ``[P, size]``; calling the result waits for it."""
    with _no_grad():
        own = x.contiguous()
        out = ops.zeros((group.size * own.shape[0],), own.dtype)
        work = group.handle.start_all_gather(out, own)
    return lambda: _waited(work, out).reshape((group.size, own.shape[0]))


def all_gather(x: Tensor, group: Group) -> Tensor:
    """One AllGather, ``[P, *x.shape]``."""
    with _no_grad():
        flat = group.handle.operator("AllGather")(x.reshape(-1))
        return flat.reshape((group.size, *x.shape))


def all_gather_uneven(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """One AllGather of pieces padded to the longest, concatenated along ``dim``."""
    with _no_grad():
        gathered = all_gather(_pad(x, dim, max(sizes)), group)
        pieces = [ops.narrow(gathered[i], dim, 0, size) for i, size in enumerate(sizes) if size]
        return ops.concat(pieces, dim)


def reduce_scatter_uneven(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """One ReduceScatter of pieces padded to the longest."""
    with _no_grad():
        longest = max(sizes)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        template = ops.zeros((*x.shape[:dim], longest, *x.shape[dim + 1 :]), x.dtype)
        pieces = [
            _pad(ops.narrow(x, dim, start, size), dim, longest) if size else template
            for start, size in zip(starts, sizes)
        ]
        flat = ops.concat([piece.reshape(-1) for piece in pieces])
        reduced = group.handle.operator("ReduceScatter", "sum")(flat).reshape(template.shape)
        own = sizes[group.rank]
        if own == 0:
            return ops.zeros((*x.shape[:dim], 0, *x.shape[dim + 1 :]), x.dtype)
        return ops.narrow(reduced, dim, 0, own).contiguous()


def all_to_all_uneven(chunks: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: Group) -> list[Tensor]:
    """One AlltoAllV."""
    with _no_grad():
        flat = ops.concat([c.reshape(-1) for c in chunks])
        received = [int(np.prod(shape)) for shape in shapes]
        out = group.handle.operator("AlltoAllV")(flat, [int(c.size) for c in chunks], received)
        pieces, start = [], 0
        for shape, size in zip(shapes, received):
            piece = out[start : start + size] if size else ops.zeros((0,), flat.dtype)
            pieces.append(piece.reshape(shape))
            start += size
        return pieces


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """One Broadcast; the operator names the source by its global rank."""
    with _no_grad():
        result: Tensor = group.handle.operator("Broadcast", group.ranks[src])((x.contiguous(),))[0]
        return result


def _waited(work: Any, out: Tensor) -> Tensor:
    work.wait()
    return out


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    zeros = ops.zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]), x.dtype)
    return ops.concat([x, zeros], dim) if x.shape[dim] else zeros
