"""Layer norms over trailing dims, each line by itself."""

from __future__ import annotations

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, Path, TensorArg
from hyper_parallel.core.shard.ops._alignment import Label, align, argument
from hyper_parallel.core.shard.ops._shapes import flatten_ints, normal_dim
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["LayerNorm"]


@register_distributed_op("layer_norm")
class LayerNorm(DistributedOp):
    """layer_norm and rms_norm. The normalized dims must be whole; weight and bias are whole, and their gradients summed
    over the mesh dims that shard the input. Option ``statistics``: how many of mean and rstd are returned as well."""

    signature = "input, normalized_shape, weight=None, bias=None, eps=1e-05, *args, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        x = argument(call, "input")
        count = _normalized_dims(call, x)
        lines: list[Label] = list(range(len(x.shape) - count))
        operands: dict[Path, list[Label]] = {"input": [*lines, *[None] * count]}
        for name in ("weight", "bias"):
            if isinstance(call.args.get(name), TensorArg):
                operands[name] = [None] * count
        aligned = align(self, call, operands)
        output = aligned.inputs["input"]
        statistics = call.options.get("statistics", 0)
        if not statistics:
            return OpPlan(output, aligned.inputs)
        small: Layout = output.replace(shape=(*x.shape[: len(lines)], *[1] * count))
        return OpPlan([output, *[small] * statistics], aligned.inputs)


def _normalized_dims(call: OpCall, x: TensorArg) -> int:
    """How many trailing dims are normalized: those of the given shape, from the given dim on, or the weight's."""
    if "normalized_shape" in call.args:
        return len(flatten_ints(call.args["normalized_shape"]))
    if "begin_norm_axis" in call.args:
        return len(x.shape) - normal_dim(call.args["begin_norm_axis"], len(x.shape))
    return len(argument(call, "weight").shape)
