"""Views that reorder, add, drop or repeat dims: each sharded dim goes with its dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Placement, Shard
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops._shapes import flatten_ints, normal_dim, normal_dims
from hyper_parallel.core.shard.ops.along_dim import require_whole
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform import get_platform

__all__ = ["Expand", "MoveDim", "Permute", "Repeat", "Squeeze", "Transpose", "Unsqueeze"]


def with_dims(layout: Layout, new_dim: Sequence[int | None], shape: Sequence[int]) -> Layout:
    """The layout in which old dim ``d`` is dim ``new_dim[d]``; sharded dims must have one."""
    placements: list[Placement] = []
    for p in layout.placements:
        target = new_dim[p.dim] if isinstance(p, Shard) else None
        placements.append(Shard(target) if target is not None else p)
    return layout.replace(placements, shape)


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout whose dim ``i`` is the old dim ``order[i]``."""
    return with_dims(layout, [order.index(d) for d in range(layout.ndim)], [layout.shape[d] for d in order])


@register_distributed_op("permute")
class Permute(DistributedOp):
    """All dims in a new order."""

    signature = "input, *dim"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        order = tuple(normal_dim(d, layout.ndim) for d in flatten_ints(call.args["dim"]))
        if sorted(order) != list(range(layout.ndim)):
            raise ValueError(f"permute: {order} is not an order of {layout.ndim} dims")
        return OpPlan(permuted(layout, order))


@register_distributed_op("transpose")
class Transpose(DistributedOp):
    """Swap two dims: transpose, t, mT, mH, adjoint (the last two), T (all dims reversed; option ``reverse``)."""

    signature = "input, dim0=-2, dim1=-1"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        order = list(range(layout.ndim))
        if call.options.get("reverse"):
            order.reverse()
        elif layout.ndim > 1:
            a, b = (normal_dim(call.args[name], layout.ndim) for name in ("dim0", "dim1"))
            order[a], order[b] = order[b], order[a]
        return OpPlan(permuted(layout, order))


@register_distributed_op("movedim")
class MoveDim(DistributedOp):
    """Move dims to other places, the rest keeps its order."""

    signature = "input, source, destination"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        source = normal_dims(call.args["source"], layout.ndim)
        destination = normal_dims(call.args["destination"], layout.ndim)
        place = dict(zip(destination, source, strict=True))
        rest = iter(d for d in range(layout.ndim) if d not in source)
        return OpPlan(permuted(layout, [place[i] if i in place else next(rest) for i in range(layout.ndim)]))


@register_distributed_op("unsqueeze")
class Unsqueeze(DistributedOp):
    """Add a dim of size 1."""

    signature = "input, dim"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        dim = normal_dim(call.args["dim"], layout.ndim + 1)
        shape = (*layout.shape[:dim], 1, *layout.shape[dim:])
        return OpPlan(with_dims(layout, [d + (d >= dim) for d in range(layout.ndim)], shape))


@register_distributed_op("squeeze")
class Squeeze(DistributedOp):
    """Drop dims of global size 1; a dim whose local part has size 1 stays."""

    signature = "input, *dim"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        given = call.args["dim"]
        asked = normal_dims(flatten_ints(given) if given != () else None, layout.ndim)
        dropped = tuple(d for d in asked if layout.shape[d] == 1)
        require_whole(self, call, layout, dropped)
        kept = [d for d in range(layout.ndim) if d not in dropped]
        new_dim = [kept.index(d) if d in kept else None for d in range(layout.ndim)]
        output = with_dims(layout, new_dim, [layout.shape[d] for d in kept])
        return OpPlan(output, run=_reshape_to(output.local_shape))


def _reshape_to(shape: tuple[int, ...]) -> Callable[..., Any]:
    return lambda _, input, *args, **kwargs: get_platform().reshape(input, shape)


@register_distributed_op("expand")
class Expand(DistributedOp):
    """Repeat dims of size 1 without a copy, and add leading dims; sharded dims keep their size."""

    signature = "input, *size"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        given = call.args["size"]
        sizes = list(flatten_ints(given))
        offset = len(sizes) - layout.ndim
        if offset < 0:
            raise ValueError(f"{call.name}: {sizes} has fewer dims than shape {layout.shape}")
        for d, size in enumerate(layout.shape):
            if sizes[offset + d] not in (-1, size) and size != 1:
                raise ValueError(f"{call.name}: shape {layout.shape} cannot be expanded to {sizes}")
            if sizes[offset + d] == -1:
                sizes[offset + d] = size
        require_whole(self, call, layout, tuple(d for d, s in enumerate(layout.shape) if sizes[offset + d] != s))
        output = with_dims(layout, [offset + d for d in range(layout.ndim)], sizes)
        local = output.local_shape
        nested = len(given) == 1 and not isinstance(given[0], int)
        return OpPlan(output, replace={"size": (local,) if nested else local})


@register_distributed_op("repeat")
class Repeat(DistributedOp):
    """repeat, tile: sharded dims are not repeated."""

    signature = "input, *repeats"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        repeats = flatten_ints(call.args["repeats"])
        if call.name == "tile":
            repeats = (1,) * (layout.ndim - len(repeats)) + repeats
        offset = len(repeats) - layout.ndim
        if offset < 0:
            raise ValueError(f"{call.name}: {repeats} has fewer dims than shape {layout.shape}")
        require_whole(self, call, layout, tuple(d for d in range(layout.ndim) if repeats[offset + d] != 1))
        shape = [r * s for r, s in zip(repeats, (1,) * offset + layout.shape, strict=True)]
        return OpPlan(with_dims(layout, [offset + d for d in range(layout.ndim)], shape))
