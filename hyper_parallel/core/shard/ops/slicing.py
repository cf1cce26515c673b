"""A box out of a tensor: MindSpore's ``slice(input, begin, size)``."""

from __future__ import annotations

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops.along_dim import require_whole
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["Slice"]


@register_distributed_op("slice")
class Slice(DistributedOp):
    """``size`` elements (-1: all that follow) from ``begin`` on, for every dim; sharded dims must be taken whole."""

    signature = "input, begin, size"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        begin, given = call.args["begin"], call.args["size"]
        size = [
            whole - b if s == -1 else s for whole, b, s in zip(layout.shape, begin, given, strict=True)
        ]
        cut = tuple(d for d, s in enumerate(size) if s != layout.shape[d])
        require_whole(self, call, layout, cut)
        output = layout.replace(shape=size)
        return OpPlan(output, replace={"size": type(given)(output.local_shape)})
