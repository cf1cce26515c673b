"""Reductions that may be repeated: of the ranks' results, the same reduction is that of the whole.

``logsumexp``, ``prod``, vector norms. The results of the ranks are gathered (one all-gather of the size of the result
for each mesh dim), so that the result is replicated and differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.redistribute import redistribute_local
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops._shapes import normal_dims
from hyper_parallel.core.shard.ops.elementwise import reduced
from hyper_parallel.core.shard.ops.reduction import reduced_layout
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["RepeatedReduction"]


@register_distributed_op("repeated_reduction")
class RepeatedReduction(DistributedOp):
    """Reduce over ``dim``, sharded or not. Options: ``norm``: the name of the argument that says which norm;
    ``minus_infinity``: rows of -inf alone are left out, as their local result has no gradient."""

    signature = "input, dim=None, keepdim=False, *, dtype=None"

    def plan(self, call: OpCall) -> OpPlan:
        layout = reduced(call.args["input"].layout)
        dims = normal_dims(call.args["dim"], layout.ndim)
        output = reduced_layout(layout, dims, bool(call.args["keepdim"]), Replicate())
        assert output is not None
        mesh_dims = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim in dims]
        if not mesh_dims:
            return OpPlan(output, {"input": layout})
        again: dict[str, Any] = {}
        name = call.options.get("norm")
        if name is not None:
            again[name] = call.args[name]
            self._check_norm(call, layout, dims, call.args[name])
        run = _reduce_twice(layout, output, dims, mesh_dims, again, bool(call.options.get("minus_infinity")))
        return OpPlan(output, {"input": layout}, run=run)

    def _check_norm(self, call: OpCall, layout: Layout, dims: tuple[int, ...], order: Any) -> None:
        matrix = isinstance(order, str) and order != "fro"
        if call.name == "linalg_norm":  # of a matrix, unless one dim or no order is given
            matrix = order is not None and not isinstance(call.args["dim"], int)
        if matrix or order == 0:
            raise self.refuse(call, f"norm {order!r} over a sharded dim")
        empty = any(
            stop == start
            for rank in layout.mesh.mesh.ravel().tolist()
            for d, (start, stop) in enumerate(layout.local_ranges(rank))
            if d in dims
        )
        if empty and not isinstance(order, str) and order is not None and (order < 0 or order == inf):
            raise self.refuse(call, f"norm {order!r} over a dim of which some rank has nothing")


def _reduce_twice(
    layout: Layout,
    output: Layout,
    dims: tuple[int, ...],
    mesh_dims: list[int],
    again: dict[str, Any],
    leave_out: bool,
) -> Callable[..., Tensor]:
    shape = output.local_shape

    def run(op_call: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        platform = get_platform()
        if leave_out:
            largest = input
            for dim in dims:
                largest, _ = platform.extremum(largest, dim, largest=True)
            some = largest > -inf
            input = platform.where(some, input, 0.0)
        result = op_call(input, *args, **kwargs)
        if leave_out:
            result = platform.where(platform.reshape(some, shape), result, -inf)
        for m in reversed(mesh_dims):
            size = layout.mesh.shape[m]
            pieces = platform.reshape(result, (*shape, 1))
            gathered = Layout(layout.mesh, [Replicate()] * layout.mesh.ndim, (*shape, size))
            sharded = gathered.replace([Shard(len(shape)) if d == m else Replicate() for d in range(layout.mesh.ndim)])
            result = op_call(redistribute_local(pieces, sharded, gathered), **again, dim=-1)
        return result

    return run
