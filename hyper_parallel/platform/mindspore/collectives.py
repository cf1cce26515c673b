"""Collectives on plain local tensors: out of place, not differentiable, identity in a group of one.

Two routes with the same results: MindSpore's operators where the device has them on sub-groups (Ascend), and an exact
emulation on ``AllReduce(sum)``, the one operator that the CPU backend has there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspore import Tensor, _no_grad

from hyper_parallel.platform.mindspore import _emulated_collectives as emulated
from hyper_parallel.platform.mindspore import _native_collectives as native
from hyper_parallel.platform.mindspore._host import on_cpu
from hyper_parallel.platform.platform import Group

__all__ = [
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all_uneven",
    "broadcast",
    "copy",
    "reduce_scatter_uneven",
    "start_all_gather",
    "start_all_reduce",
]

# MindSpore differentiates its own communication operators (AllReduce to another AllReduce), which gives gradients times
# the number of ranks. Nothing here is recorded; whoever wants a gradient states it with custom_grad.linear_map.


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """Elementwise ``op`` over the group."""
    if group.size == 1 or x.size == 0:
        return copy(x)
    return native.all_reduce(x, op, group) if group.handle.native else emulated.all_reduce(x, op, group)


def start_all_reduce(x: Tensor, op: str, group: Group) -> Callable[[], Tensor]:
    """Start :func:`all_reduce` of ``x``, which nobody may use any more; calling the result waits for it."""
    if group.size > 1 and x.size and group.handle.native:
        return native.start_all_reduce(x, op, group)
    total = all_reduce(x, op, group)
    return lambda: total


def start_all_gather(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start :func:`all_gather` of a vector; calling the result waits for it."""
    if group.size > 1 and x.size and group.handle.native:
        return native.start_all_gather(x, group)
    gathered = all_gather(x, group)
    return lambda: gathered


def all_gather(x: Tensor, group: Group) -> Tensor:
    """``[P, *x.shape]`` in group order."""
    if group.size == 1 or x.size == 0:
        return emulated.empty_or_alone(x, (group.size, *x.shape))
    return native.all_gather(x, group) if group.handle.native else emulated.all_gather(x, group)


def all_gather_uneven(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Concatenate along ``dim`` pieces of ``sizes``."""
    shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    if group.size == 1 or 0 in shape:
        return emulated.empty_or_alone(x, shape)
    route = native if group.handle.native else emulated
    return route.all_gather_uneven(x, dim, sizes, group)


def reduce_scatter_uneven(x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Sum over the group, keep this member's piece of ``dim``."""
    if group.size == 1 or x.size == 0:
        return emulated.empty_or_alone(x, (*x.shape[:dim], sizes[group.rank], *x.shape[dim + 1 :]))
    route = native if group.handle.native else emulated
    return route.reduce_scatter_uneven(x, dim, sizes, group)


def all_to_all_uneven(chunks: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: Group) -> list[Tensor]:
    """Send ``chunks[i]`` to member i, receive ``shapes[i]`` from it."""
    if group.size == 1:
        return [copy(chunks[0])]
    route = native if group.handle.native else emulated
    return route.all_to_all_uneven(chunks, shapes, group)


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """The tensor of member ``src``."""
    if group.size == 1 or x.size == 0:
        return copy(x)
    return native.broadcast(x, src, group) if group.handle.native else emulated.broadcast(x, src, group)


def copy(x: Tensor) -> Tensor:
    """The values in memory of their own."""
    if on_cpu():
        return emulated.empty_or_alone(x, x.shape)
    with _no_grad():
        return x.copy()
