"""Writing along a dim that is whole (scatter, index_add, index_copy, index_fill), and index_select."""

from __future__ import annotations

from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, Path, TensorArg
from hyper_parallel.core.shard.ops._alignment import Label, align, argument
from hyper_parallel.core.shard.ops._shapes import normal_dim
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["IndexSelect", "IndexUpdate", "Scatter"]


@register_distributed_op("scatter")
class Scatter(DistributedOp):
    """scatter, scatter_add, scatter_reduce: ``dim`` is whole; other sharded dims have one size in all tensors."""

    signature = "input, dim, index, *src, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        x = argument(call, "input")
        dim = normal_dim(call.args["dim"], len(x.shape))
        operands: dict[Path, list[Label]] = {}
        for path, t in call.tensors():
            if len(t.shape) == len(x.shape):
                operands[path] = [d if d != dim and s == x.shape[d] else None for d, s in enumerate(t.shape)]
            else:
                operands[path] = [None] * len(t.shape)
        aligned = align(self, call, operands)
        for label in aligned.labels:  # where the input is cut, the others must be cut as well, so they need the dim
            if label is not None and any(label not in own for own in operands.values() if own):
                raise self.refuse(call, f"dim {label} is sharded, but has another size in one of the tensors")
        return OpPlan(aligned.output(call, operands["input"], x.shape), aligned.inputs)


@register_distributed_op("index_update")
class IndexUpdate(DistributedOp):
    """index_add, index_copy, index_fill: ``dim`` is whole, the index too."""

    signature = "input, dim, index, source, *, alpha=1"

    def plan(self, call: OpCall) -> OpPlan:
        x = argument(call, "input")
        dim = normal_dim(call.args["dim"], len(x.shape))
        labels: list[Label] = [d if d != dim else None for d in range(len(x.shape))]
        operands: dict[Path, list[Label]] = {"input": labels, "index": [None] * len(argument(call, "index").shape)}
        source = call.args["source"]
        if isinstance(source, TensorArg):
            operands["source"] = labels if len(source.shape) == len(labels) else [None] * len(source.shape)
        aligned = align(self, call, operands)
        return OpPlan(aligned.output(call, labels, x.shape), aligned.inputs)


@register_distributed_op("index_select")
class IndexSelect(DistributedOp):
    """Chosen indices of a dim that is whole; the index may be sharded instead."""

    signature = "input, dim, index"

    def plan(self, call: OpCall) -> OpPlan:
        x, index = argument(call, "input"), argument(call, "index")
        dim = normal_dim(call.args["dim"], len(x.shape))
        own: list[Label] = [d if d != dim else None for d in range(len(x.shape))]
        labels: list[Label] = [d if d != dim else "place" for d in range(len(x.shape))]
        operands: dict[Path, list[Label]] = {"input": own, "index": ["place"] if index.shape else []}
        aligned = align(self, call, operands, "multiply")
        shape = (*x.shape[:dim], index.shape[0] if index.shape else 1, *x.shape[dim + 1 :])
        return OpPlan(aligned.output(call, labels, shape), aligned.inputs)
