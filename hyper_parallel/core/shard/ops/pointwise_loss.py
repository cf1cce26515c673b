"""Losses that are a function of each element, then a sum or mean: a sharded input gives a Partial result."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from hyper_parallel.core.placement_types import Partial, Placement
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, TensorArg
from hyper_parallel.core.shard.ops._alignment import align, broadcast_labels
from hyper_parallel.core.shard.ops._shapes import broadcast_shape
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform.platform import Tensor

__all__ = ["PointwiseLoss"]


@register_distributed_op("pointwise_loss")
class PointwiseLoss(DistributedOp):
    """mse_loss, kl_div, ...; the mean divides by the global number of elements (``batchmean``: of rows)."""

    signature = "input, target, size_average=None, reduce=None, reduction='mean', **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        reduction = call.args["reduction"]
        if call.args.get("size_average") is not None or call.args.get("reduce") is not None:
            raise self.refuse(call, "size_average and reduce are deprecated; use reduction")
        if call.options.get("weighted_mean") and call.args.get("weight") is not None:
            raise self.refuse(call, "weight is not supported on sharded tensors; multiply before the mean")
        tensors = dict(call.tensors())
        shape = broadcast_shape(*(t.shape for t in tensors.values()))
        for name in ("input", "target"):
            if isinstance(call.args[name], TensorArg) and call.args[name].shape != shape:
                raise self.refuse(call, f"{name} would be broadcast to {shape}; expand it first")
        aligned = align(self, call, {path: broadcast_labels(t, shape) for path, t in tensors.items()})
        layout = aligned.output(call, list(range(len(shape))), shape)
        if reduction == "none":
            return OpPlan(layout, aligned.inputs)
        counts = {"sum": 1, "mean": prod(shape), "batchmean": shape[0] if shape else 1}
        if reduction not in counts:
            raise ValueError(f"{call.name}: unknown reduction {reduction!r}")
        placements: list[Placement] = [Partial() if p.is_shard() else p for p in layout.placements]
        count = counts[reduction]

        def run(op_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
            return op_call(*args, **kwargs) / count

        return OpPlan(layout.replace(placements, ()), aligned.inputs, {"reduction": "sum"}, run)
