"""argmax and argmin, also over a sharded dim: local winners are gathered and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops._shapes import normal_dim
from hyper_parallel.core.shard.ops.elementwise import reduced
from hyper_parallel.core.shard.ops.reduction import reduced_layout
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["ArgExtremum"]


@register_distributed_op("arg_extremum")
class ArgExtremum(DistributedOp):
    """The index of the largest (option ``largest``) or smallest element along ``dim``; the first one among equals.

    Over a sharded dim the result is replicated on its mesh dims. Collectives: two all-gathers for each of these, of the
    size of the result.
    """

    signature = "input, dim=None, keepdim=False"

    def plan(self, call: OpCall) -> OpPlan:
        layout = reduced(call.args["input"].layout)
        dim, keepdim = call.args["dim"], bool(call.args["keepdim"])
        if dim is None:
            if any(p.is_shard() for p in layout.placements):
                raise self.refuse(call, "the index in a flattened sharded tensor; give a dim")
            return OpPlan(layout.replace(shape=()), {"input": layout})
        dim = normal_dim(dim, layout.ndim)
        output = reduced_layout(layout, (dim,) if layout.ndim else (), keepdim, Replicate())
        assert output is not None
        mesh_dims = layout.tensor_map[dim] if layout.ndim else ()
        run = _winner(layout, dim, mesh_dims, output, bool(call.options["largest"])) if mesh_dims else None
        return OpPlan(output, {"input": layout}, run=run)


def _winner(
    layout: Layout, dim: int, mesh_dims: tuple[int, ...], output: Layout, largest: bool
) -> Callable[..., Tensor]:
    start = layout.local_offset[dim]

    def run(op_call: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        platform = get_platform()
        value, index = platform.extremum(platform.detach(input), dim, largest)
        index = index + start
        for m in reversed(mesh_dims):  # the innermost cut first, so that equals keep their order
            group = layout.mesh.get_group(m)
            values, indices = platform.all_gather(value, group), platform.all_gather(index, group)
            value, rank = platform.extremum(values, 0, largest)
            value = platform.reshape(value, platform.shape(values)[1:])
            index = 0
            for r in range(group.size):
                chosen = platform.narrow(indices, 0, r, 1) * (rank == r)
                index = index + platform.reshape(chosen, platform.shape(values)[1:])
        return platform.reshape(index, output.local_shape)

    return run
