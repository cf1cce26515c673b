"""Operators that work along some dims, each line by itself: these dims have to be whole."""

from __future__ import annotations

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Shard
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops._shapes import flatten_ints, normal_dims
from hyper_parallel.core.shard.ops.elementwise import reduced
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["AlongDim", "Flip", "Softmax", "Triangle"]


def require_whole(op: DistributedOp, call: OpCall, layout: Layout, dims: tuple[int, ...]) -> None:
    """Refuse where one of ``dims`` is sharded."""
    for m, p in enumerate(layout.placements):
        if isinstance(p, Shard) and p.dim in dims:
            raise op.refuse(call, f"dim {p.dim} is sharded over {call.mesh.dim_labels[m]}, but must be whole")


@register_distributed_op("along_dim")
class AlongDim(DistributedOp):
    """The result has the input's layout.

    Options: ``linear``: a Partial sum stays Partial; ``outputs``: number of results; ``size``: the new size of the dim,
    the name of an argument or ``half``.
    """

    signature = "input, dim=-1, *args, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        source: Layout = call.args["input"].layout
        linear = call.options.get("linear") and all(p == Partial() for p in source.placements if p.is_partial())
        target = source if linear else reduced(source)
        dims = normal_dims(self._dim(call, source), source.ndim)
        require_whole(self, call, source, dims)
        output = target
        size = call.options.get("size")
        if size is not None:
            shape = list(source.shape)
            shape[dims[0]] = shape[dims[0]] // 2 if size == "half" else call.args[size]
            output = target.replace(shape=shape)
        count = call.options.get("outputs", 1)
        return OpPlan(output if count == 1 else [output] * count, {"input": target})

    def _dim(self, call: OpCall, source: Layout) -> int | tuple[int, ...] | None:
        found: int | tuple[int, ...] | None = call.args["dim"]
        return found


@register_distributed_op("flip")
class Flip(AlongDim):
    """Reverse dims given as ``f(0, 1)`` or ``f((0, 1))``."""

    signature = "input, *dim"

    def _dim(self, call: OpCall, source: Layout) -> int | tuple[int, ...] | None:
        return flatten_ints(call.args["dim"])


@register_distributed_op("softmax")
class Softmax(AlongDim):
    """softmax and log_softmax; without ``dim``, PyTorch's old choice: 0 for 0, 1 or 3 dims, else 1."""

    signature = "input, dim=None, *args, **kwargs"

    def _dim(self, call: OpCall, source: Layout) -> int | tuple[int, ...] | None:
        if call.args["dim"] is None:
            return 0 if source.ndim in (0, 1, 3) else 1
        return super()._dim(call, source)


@register_distributed_op("triangle")
class Triangle(DistributedOp):
    """tril and triu: on a shard of the last two dims the diagonal moves."""

    signature = "input, diagonal=0"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        if layout.ndim < 2:
            raise ValueError(f"{call.name} needs at least 2 dims, found shape {layout.shape}")
        target = layout if all(p == Partial() for p in layout.placements if p.is_partial()) else reduced(layout)
        rows, columns = target.local_offset[-2:]
        return OpPlan(target, {"input": target}, {"diagonal": call.args["diagonal"] + rows - columns})
