"""New tensors: like another one, or of a given shape; padding and one-hot."""

from __future__ import annotations

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops._shapes import flatten_ints
from hyper_parallel.core.shard.ops.along_dim import require_whole
from hyper_parallel.core.shard.ops.elementwise import reduced
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["Like", "New", "OneHot", "Pad"]


@register_distributed_op("like")
class Like(DistributedOp):
    """zeros_like, full_like, ...: the layout of the input, of which only shape and dtype are used."""

    signature = "input, *args, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        return OpPlan(reduced(call.args["input"].layout))


@register_distributed_op("new")
class New(DistributedOp):
    """new_zeros, new_full, ...: replicated, of the shape asked for."""

    signature = "input, *size, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        return OpPlan(Layout(call.mesh, [Replicate()] * call.mesh.ndim, flatten_ints(call.args["size"])))


@register_distributed_op("pad")
class Pad(DistributedOp):
    """``F.pad``: dims that are padded must be whole."""

    signature = "input, pad, mode='constant', value=None"

    def plan(self, call: OpCall) -> OpPlan:
        source: Layout = call.args["input"].layout
        pad = flatten_ints(call.args["pad"])
        linear = call.args["mode"] != "constant" or not call.args["value"]
        keep = linear and all(p == Partial() for p in source.placements if p.is_partial())
        target = source if keep else reduced(source)
        shape = list(target.shape)
        padded = []
        for i, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
            dim = len(shape) - 1 - i
            if before or behind:
                padded.append(dim)
            shape[dim] += before + behind
        require_whole(self, call, target, tuple(padded))
        return OpPlan(target.replace(shape=shape), {"input": target})


@register_distributed_op("one_hot")
class OneHot(DistributedOp):
    """One-hot rows in a new last dim, which is whole."""

    signature = "input, num_classes=-1"

    def plan(self, call: OpCall) -> OpPlan:
        layout = reduced(call.args["input"].layout)
        classes = call.args["num_classes"]
        if classes < 0:
            raise self.refuse(call, "num_classes must be given, the largest value is not known on every rank")
        return OpPlan(layout.replace(shape=(*layout.shape, classes)), {"input": layout})
