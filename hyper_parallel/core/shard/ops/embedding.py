"""Embedding lookup, and gathering along a sharded dim: each rank looks up what it owns, the rest is zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops._alignment import Label, align, argument
from hyper_parallel.core.shard.ops._shapes import normal_dim
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["Embedding", "Gather"]


def own_indices(index: Tensor, start: int, stop: int, size: int) -> tuple[Tensor, Tensor]:
    """Global indices as local ones of ``[start, stop)``, and a mask of those that lie there (others become 0).

    What is outside ``[0, size)`` becomes -1, which is invalid on every rank, so that all of them fail.
    """
    inside = (index >= start) & (index < stop)
    invalid = (index < 0) | (index >= size)
    return (index - start) * inside - invalid * 1, inside


def pad_if_empty(x: Tensor, dim: int) -> Tensor:
    """``x``, or one zero along ``dim`` where it has no elements: still on the graph."""
    platform = get_platform()
    shape = list(platform.shape(x))
    if shape[dim]:
        return x
    shape[dim] = 1
    return platform.cat([x, platform.zeros(shape, x)], dim)


@register_distributed_op("embedding")
class Embedding(DistributedOp):
    """``weight[input]``. ``weight: S(0)`` (vocabulary) -> Partial; ``S(1)`` (hidden) -> last dim sharded.

    ``input`` may be sharded where the weight is whole. An index outside the table is invalid on every rank.
    """

    signature = "input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False"

    def plan(self, call: OpCall) -> OpPlan:
        index, weight = argument(call, "input"), argument(call, "weight")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if call.args[option]:
                raise self.refuse(call, f"{option} is not supported on sharded tensors")
        if not index.dtype.startswith(("int", "uint")):
            raise self.refuse(call, f"expected integer indices, found {index.dtype}")
        rows: list[Label] = list(range(len(index.shape)))
        aligned = align(self, call, {"input": rows, "weight": ["vocabulary", "hidden"]}, "multiply")
        output = aligned.output(call, [*rows, "hidden"], (*index.shape, weight.shape[1]))
        layout = aligned.inputs["weight"]
        run = _lookup(layout) if any(p.is_shard(0) for p in layout.placements) else None
        return OpPlan(output, aligned.inputs, run=run)


def _lookup(weight_layout: Layout) -> Callable[..., Tensor]:
    start, stop = weight_layout.local_ranges()[0]
    size = weight_layout.shape[0]

    def run(
        op_call: Callable[..., Any],
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        platform = get_platform()
        if padding_idx is not None:
            padding_idx = padding_idx % size - start
            padding_idx = padding_idx if 0 <= padding_idx < stop - start else None
        local, inside = own_indices(input, start, stop, size)
        found = op_call(local, pad_if_empty(weight, 0), padding_idx, *args, **kwargs)
        return platform.where(platform.reshape(inside, (*platform.shape(inside), 1)), found, 0)

    return run


@register_distributed_op("gather")
class Gather(DistributedOp):
    """``gather(input, dim, index)``. Over a sharded ``dim`` the result is Partial: the owner's value, else zero."""

    signature = "input, dim, index, *, sparse_grad=False"

    def plan(self, call: OpCall) -> OpPlan:
        x, index = argument(call, "input"), argument(call, "index")
        if len(x.shape) != len(index.shape):
            raise ValueError(f"{call.describe()}: index must have as many dims as the input")
        dim = normal_dim(call.args["dim"], len(x.shape))
        # row i of the index looks into row i of the input, also where the input has more rows
        own: list[Label] = [d if x.shape[d] == index.shape[d] else None for d in range(len(x.shape))]
        labels = list(own)
        own[dim], labels[dim] = "looked up", "place"
        aligned = align(self, call, {"input": own, "index": labels}, "multiply")
        layout = aligned.inputs["input"]
        run = _gather(layout, dim) if any(p.is_shard(dim) for p in layout.placements) else None
        return OpPlan(aligned.output(call, labels, index.shape), aligned.inputs, run=run)


def _gather(layout: Layout, place: int) -> Callable[..., Tensor]:
    start, stop = layout.local_ranges()[place]
    size = layout.shape[place]

    def run(op_call: Callable[..., Any], input: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
        local, inside = own_indices(index, start, stop, size)
        found = op_call(pad_if_empty(input, place), dim, local)
        return get_platform().where(inside, found, 0)

    return run
