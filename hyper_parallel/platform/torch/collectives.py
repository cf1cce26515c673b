"""Collectives on plain local tensors: out of place, not differentiable, identity in a group of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

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

# renamed in newer releases, the old names warn there
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(x: torch.Tensor, op: str, group: Group) -> torch.Tensor:
    """Elementwise ``op`` over the group."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        # gloo has no bool reductions; on {0, 1} bytes they mean the same
        wire = out.view(torch.uint8) if out.dtype == torch.bool else out
        dist.all_reduce(wire, _REDUCE_OPS[op], group=group.handle)
    return out


def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``[P, *x.shape]`` in group order."""
    x = x.detach().contiguous()
    if group.size == 1:
        return x.clone()[None]
    out = x.new_empty((group.size, *x.shape))
    if x.numel():
        _all_gather_single(out.view(-1), x.view(-1), group=group.handle)
    return out


def start_all_reduce(x: torch.Tensor, op: str, group: Group) -> Callable[[], torch.Tensor]:
    """Start :func:`all_reduce` of numbers in a group of more than one; calling the result waits for it."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(out, _REDUCE_OPS[op], group=group.handle, async_op=True)
    return lambda: _waited(work, out)


def start_all_gather(x: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Start :func:`all_gather` of some numbers in a group of more than one; calling the result waits for it."""
    x = x.detach().contiguous()
    out = x.new_empty((group.size, *x.shape))
    work = _all_gather_single(out.view(-1), x.view(-1), group=group.handle, async_op=True)
    return lambda: _waited(work, out)


def all_gather_uneven(x: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """Concatenate along ``dim`` pieces of ``sizes``."""
    if group.size == 1:
        return x.detach().clone()
    if len(set(sizes)) == 1:
        stacked = all_gather(x, group)
        if dim == 0:
            return stacked.flatten(0, 1)
        return torch.cat(stacked.unbind(0), dim)
    longest = max(sizes)
    padded = x.new_zeros((*x.shape[:dim], longest, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x.detach())
    stacked = all_gather(padded, group)
    return torch.cat([piece.narrow(dim, 0, size) for piece, size in zip(stacked.unbind(0), sizes, strict=True)], dim)


def reduce_scatter_uneven(x: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """Sum over the group, keep this member's piece of ``dim``."""
    if group.size == 1:
        return x.detach().clone()
    pieces = [p.contiguous() for p in torch.split(x.detach(), list(sizes), dim)]
    if len(set(sizes)) > 1:
        longest = max(sizes)
        padded = [x.new_zeros((*p.shape[:dim], longest, *p.shape[dim + 1 :])) for p in pieces]
        for buffer, piece in zip(padded, pieces, strict=True):
            buffer.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    else:
        padded = pieces
    out = torch.empty_like(padded[0])
    if out.numel():
        _reduce_scatter_single(out.view(-1), torch.stack(padded).view(-1), group=group.handle)
    return out.narrow(dim, 0, sizes[group.rank]).contiguous()


def all_to_all_uneven(
    chunks: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], group: Group
) -> list[torch.Tensor]:
    """Send ``chunks[i]`` to member i, receive ``shapes[i]`` from it."""
    if group.size == 1:
        return [chunks[0].detach().clone()]
    flat = torch.cat([c.detach().reshape(-1) for c in chunks])
    received = [int(torch.Size(s).numel()) for s in shapes]
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(out, flat, received, [c.numel() for c in chunks], group=group.handle)
    return [piece.view(shape) for piece, shape in zip(out.split(received), shapes, strict=True)]


def broadcast(x: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    """The tensor of member ``src``."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        dist.broadcast(out, group.ranks[src], group=group.handle)
    return out


def _waited(work: dist.Work | None, out: torch.Tensor) -> torch.Tensor:
    if work is not None:
        work.wait()
    return out
