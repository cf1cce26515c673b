"""Reductions over dims: sums stay Partial where the dim is sharded, extrema become ``Partial("max")``."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Shard
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, TensorArg
from hyper_parallel.core.shard.ops._shapes import normal_dims
from hyper_parallel.core.shard.ops.elementwise import Elementwise, reduced
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["Extremum", "Mean", "Reduction", "reduced_layout"]


def reduced_layout(
    layout: Layout, dims: tuple[int, ...], keepdim: bool, over: Placement | None
) -> Layout | None:
    """The layout after reducing ``dims``; mesh dims that shard one of them get ``over`` (None: they must not)."""
    shape: list[int] = []
    new_dim: dict[int, int] = {}
    for d, size in enumerate(layout.shape):
        if d not in dims:
            new_dim[d] = len(shape)
            shape.append(size)
        elif keepdim:
            shape.append(1)
    placements: list[Placement] = []
    for p in layout.placements:
        if isinstance(p, Shard) and p.dim in dims:
            if over is None:
                return None
            placements.append(over)
        else:
            placements.append(Shard(new_dim[p.dim]) if isinstance(p, Shard) else p)
    return layout.replace(placements, shape)


@register_distributed_op("reduction")
class Reduction(DistributedOp):
    """Reduce over ``dim`` (None: all dims).

    Options: ``over``: what a sharded dim that is reduced leaves behind, ``sum``, ``max`` or ``min`` (default: refused);
    ``linear``: a Partial input stays Partial; ``outputs``: number of results.
    """

    signature = "input, dim=None, keepdim=False, *, dtype=None"

    def plan(self, call: OpCall) -> OpPlan:
        source, target, output = self._layouts(call)
        outputs = call.options.get("outputs", 1)
        return OpPlan(output if outputs == 1 else [output] * outputs, {"input": target}, run=self._run(call, source))

    def _layouts(self, call: OpCall) -> tuple[Layout, Layout, Layout]:
        """Of the input, of what it is turned into first, and of the result."""
        source: Layout = call.args["input"].layout
        linear = bool(call.options.get("linear"))
        summed = linear and all(p == Partial() for p in source.placements if p.is_partial())
        target = source if summed else reduced(source)
        dims = normal_dims(call.args.get("dim"), source.ndim)
        over = call.options.get("over")
        output = reduced_layout(target, dims, bool(call.args.get("keepdim")), Partial(over) if over else None)
        if output is None:
            raise self.refuse(call, f"cannot reduce over dims {dims}, one of which is sharded")
        return source, target, output

    def _run(self, call: OpCall, source: Layout) -> Callable[..., Any] | None:
        return None


@register_distributed_op("mean")
class Mean(Reduction):
    """The mean over ``dim``; the local means are weighted with their share of the elements."""

    def _run(self, call: OpCall, source: Layout) -> Callable[..., Any] | None:
        dims = normal_dims(call.args.get("dim"), source.ndim)
        total = prod(source.shape[d] for d in dims)
        own = prod(source.local_shape[d] for d in dims)
        if total == 0 or not any(isinstance(p, Shard) and p.dim in dims for p in source.placements):
            return None
        empty = [d for d in dims if source.local_shape[d] == 0]

        def run(op_call: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if empty:  # the mean of one zero: 0 rather than 0/0, and still on the graph
                input = _pad_empty(input, empty)
            return op_call(input, *args, **kwargs) * (own / total)

        return run


@register_distributed_op("extremum")
class Extremum(Reduction):
    """``max`` and ``min``: of all elements, over one dim (values and indices), or of two tensors."""

    signature = "input, dim=None, keepdim=False"

    def plan(self, call: OpCall) -> OpPlan:
        over = call.options["over"]
        other = call.args.get("other", call.args["dim"])
        if isinstance(other, TensorArg):
            return Elementwise().plan(call)
        _, target, output = self._layouts(call)
        sharded = output.has_partial  # the input has none left
        pair = call.args["dim"] is not None and not call.options.get("values_only")
        if sharded and pair:
            raise self.refuse(call, f"the index of the {over} over a sharded dim; use a{over} or arg{over}")
        run = self._extreme(call, target, output) if sharded else None
        return OpPlan([output, output] if pair else output, {"input": target}, run=run)

    def _extreme(self, call: OpCall, source: Layout, output: Layout) -> Callable[..., Any]:
        text, over = call.describe(), call.options["over"]
        dims = normal_dims(call.args["dim"], source.ndim)
        empty = any(s == 0 for d, s in enumerate(source.local_shape) if d in dims)

        def run(op_call: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            platform = get_platform()
            if platform.requires_grad(input):
                raise UnsupportedOperatorError(f"{text}: over a sharded dim it has no gradient; detach() the input")
            if not empty:
                return op_call(input, *args, **kwargs)
            for dim in dims:
                input, _ = platform.extremum(input, dim, largest=over == "max")
            return platform.reshape(input, output.local_shape)

        return run


def _pad_empty(x: Tensor, dims: list[int]) -> Tensor:
    platform = get_platform()
    for dim in dims:
        shape = list(platform.shape(x))
        shape[dim] = 1
        x = platform.cat([x, platform.zeros(shape, x)], dim)
    return x
