"""Taking slices by index: ``input[:, index, :]`` with an index of any shape. MindSpore's ``gather``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops._alignment import Label, align, argument
from hyper_parallel.core.shard.ops._shapes import normal_dim
from hyper_parallel.core.shard.ops.embedding import own_indices, pad_if_empty
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["Take"]


@register_distributed_op("take")
class Take(DistributedOp):
    """``take(input, index, dim)``: dim ``dim`` gives way to the dims of the index.

    Over a sharded ``dim`` the result is Partial: the owner's slice, else zero. With ``dim=0`` this is an embedding.
    """

    signature = "input, index, dim, batch_dims=0"

    def plan(self, call: OpCall) -> OpPlan:
        x, index = argument(call, "input"), argument(call, "index")
        if call.args["batch_dims"]:
            raise self.refuse(call, "batch_dims is not supported on sharded tensors")
        dim = normal_dim(call.args["dim"], len(x.shape))
        own: list[Label] = [*range(len(x.shape))]
        places: list[Label] = [("place", i) for i in range(len(index.shape))]
        own[dim] = "looked up"
        aligned = align(self, call, {"input": own, "index": places}, "multiply")
        layout = aligned.inputs["input"]
        output = aligned.output(
            call, [*own[:dim], *places, *own[dim + 1 :]], (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
        )
        run = _take(layout, dim) if any(p.is_shard(dim) for p in layout.placements) else None
        return OpPlan(output, aligned.inputs, run=run)


def _take(layout: Layout, dim: int) -> Callable[..., Tensor]:
    start, stop = layout.local_ranges()[dim]
    size = layout.shape[dim]

    def run(op_call: Callable[..., Any], input: Tensor, index: Tensor, _: int, *args: Any) -> Tensor:
        platform = get_platform()
        local, inside = own_indices(index, start, stop, size)
        found = op_call(pad_if_empty(input, dim), local, dim, *args)
        behind = len(layout.shape) - dim - 1
        mask = platform.reshape(inside, (*[1] * dim, *platform.shape(index), *[1] * behind))
        return platform.where(mask, found, 0)

    return run
