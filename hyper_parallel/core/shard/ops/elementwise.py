"""Elementwise operators of any number of tensors, with broadcasting."""

from __future__ import annotations

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, Path, TensorArg
from hyper_parallel.core.shard.ops._alignment import Label, PartialRule, align, argument, broadcast_labels
from hyper_parallel.core.shard.ops._shapes import broadcast_shape
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["Cast", "Data", "Elementwise", "ExpandAs", "Where", "reduced"]


def reduced(layout: Layout) -> Layout:
    """The layout with every Partial reduced to Replicate."""
    if not layout.has_partial:
        return layout
    return layout.replace([Replicate() if p.is_partial() else p for p in layout.placements])


@register_distributed_op("elementwise")
class Elementwise(DistributedOp):
    """``y[i] = f(a[i], b[i], ...)`` with broadcasting.

    Operands that share a dim are sharded alike (a replicated one is sliced). Partial operands are reduced first,
    unless the option ``partial`` says how ``f`` is linear: ``linear`` (in its one tensor: neg), ``add`` (jointly: add,
    sub), ``multiply`` (in each: mul), ``divide`` (in ``input``: div).
    """

    def plan(self, call: OpCall) -> OpPlan:
        tensors = dict(call.tensors())
        shape = broadcast_shape(*(t.shape for t in tensors.values()))
        operands = {path: broadcast_labels(t, shape) for path, t in tensors.items()}
        aligned = align(self, call, operands, self._rule(call, tensors))
        return OpPlan(aligned.output(call, list(range(len(shape))), shape), aligned.inputs)

    def _rule(self, call: OpCall, tensors: dict[Path, TensorArg]) -> PartialRule:
        rule = call.options.get("partial")
        if rule == "linear" or rule == "multiply":
            return "multiply"
        if rule == "add":
            numbers = [x for x in (call.args["input"], call.args["other"]) if not isinstance(x, TensorArg)]
            if not numbers:
                return "add"
            return "multiply" if numbers[0] == 0 else "reduce"  # other numbers would be added on every rank
        if rule == "divide" and call.args.get("rounding_mode") is None:
            other = tensors.get("other")
            if other is None or not other.layout.has_partial:
                return "multiply"
        return "reduce"


@register_distributed_op("where")
class Where(Elementwise):
    """``where(condition, x, y)``; with the condition alone the shape of the result depends on the values."""

    signature = "condition, *others, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        if not call.args["others"] and "input" not in call.args:
            raise self.refuse(call, "the shape of the result depends on the values")
        return super().plan(call)


@register_distributed_op("cast")
class Cast(DistributedOp):
    """Another dtype or device, same layout. A Partial is reduced first: rounding, truncating terms is not linear.

    Tensors among the other arguments only lend their dtype.
    """

    signature = "input, *args, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        layout = reduced(call.args["input"].layout)
        if call.name == "type" and not call.args["args"] and "dtype" not in call.args:
            return OpPlan(None)
        return OpPlan(layout, {"input": layout})


@register_distributed_op("data")
class Data(DistributedOp):
    """The attribute ``data``: read it, or set it to a tensor with the same layout."""

    signature = "input, *value"

    def plan(self, call: OpCall) -> OpPlan:
        layout = call.args["input"].layout
        for value in call.args["value"]:
            if not isinstance(value, TensorArg) or value.layout != layout:
                raise self.refuse(call, "data can only be set to a tensor with the same layout")
            return OpPlan(None)
        return OpPlan(layout)


@register_distributed_op("expand_as")
class ExpandAs(DistributedOp):
    """``expand_as(input, other)``: the result lies like ``other``, of which only the shape is used."""

    signature = "input, other"

    def plan(self, call: OpCall) -> OpPlan:
        source, other = argument(call, "input"), argument(call, "other")
        shape = other.shape
        if broadcast_shape(source.shape, shape) != shape:
            raise ValueError(f"expand_as: shape {source.shape} cannot be expanded to {shape}")
        labels: list[Label] = list(range(len(shape)))
        aligned = align(self, call, {"input": broadcast_labels(source, shape), "other": labels}, "multiply")
        result = list(aligned.output(call, labels, shape).placements)
        needed = list(aligned.inputs["other"].placements)
        for m, label in enumerate(aligned.labels):
            if label is None:  # each term of a Partial `other` has the whole shape, which is all that is needed
                needed[m] = other.layout.placements[m]
                result[m] = aligned.inputs["input"].placements[m]
        return OpPlan(
            other.layout.replace(result),
            {"input": aligned.inputs["input"], "other": other.layout.replace(needed)},
        )
