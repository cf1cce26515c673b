"""``x[index]`` and ``x[index] = value``, narrow and select: sharded dims must be taken whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, Path, TensorArg
from hyper_parallel.core.shard.ops._alignment import Label, align, broadcast_labels
from hyper_parallel.core.shard.ops._shapes import broadcast_shape, normal_dim
from hyper_parallel.core.shard.ops.along_dim import require_whole
from hyper_parallel.core.shard.ops.elementwise import reduced
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["GetItem", "Narrow", "Select", "SetItem"]


@dataclass
class _Index:
    """What an index does: labels of the source's dims and of the result's, the result's shape, index tensors."""

    source: list[Label] = field(default_factory=list)
    result: list[Label] = field(default_factory=list)
    shape: list[int] = field(default_factory=list)
    tensors: dict[Path, TensorArg] = field(default_factory=dict)
    whole: list[Path] = field(default_factory=list)  # full slices in numbers: to be [:], which fits a shard as well
    places: list[int] = field(default_factory=list)  # where the index tensors stand in the result


def read_index(op: DistributedOp, call: OpCall) -> _Index:
    """Read ``call.args["index"]`` against the shape of the input.

    Raises:
        UnsupportedOperatorError: masks, and lists, whose result's shape depends on values or which are ambiguous.
        IndexError: too many indices, or an integer out of range.
    """
    shape = call.args["input"].shape
    index = call.args["index"]
    parts: list[tuple[Path, Any]] = [(("index", i), v) for i, v in enumerate(index)] if isinstance(index, tuple) else [
        ("index", index)
    ]
    used = sum(v is not None and v is not Ellipsis for _, v in parts)
    if used > len(shape):
        raise IndexError(f"{call.describe()}: {used} indices for {len(shape)} dims")
    if not any(v is Ellipsis for _, v in parts):
        parts.append(("index", Ellipsis))
    found = _Index()
    dim = 0
    for path, part in parts:
        if part is None:
            found.result.append(None)
            found.shape.append(1)
        elif part is Ellipsis:
            for _ in range(len(shape) - used):
                _take_whole(found, dim, shape[dim])
                dim += 1
        else:
            _read_part(op, call, found, path, part, dim, shape[dim])
            dim += 1
    _place_tensors(found)
    return found


def _take_whole(found: _Index, dim: int, size: int) -> None:
    found.source.append(("dim", dim))
    found.result.append(("dim", dim))
    found.shape.append(size)


def _read_part(
    op: DistributedOp, call: OpCall, found: _Index, path: Path, part: Any, dim: int, size: int
) -> None:
    if isinstance(part, slice):
        if any(v is not None and not isinstance(v, Integral) for v in (part.start, part.stop, part.step)):
            raise op.refuse(call, "slices whose bounds are not integers")
        chosen = part.indices(size)
        if chosen == (0, size, 1):
            _take_whole(found, dim, size)
            if part != slice(None):
                found.whole.append(path)
        else:
            found.source.append(None)
            found.result.append(None)
            found.shape.append(len(range(*chosen)))
    elif isinstance(part, TensorArg) and part.dtype.startswith(("int", "uint")) and part.dtype != "uint8":
        found.source.append(None)
        found.tensors[path] = part
        found.places.append(len(found.result))
    elif isinstance(part, bool) or not isinstance(part, Integral):
        raise op.refuse(call, f"an index of {type(part).__name__}: masks, lists and arrays are not supported")
    else:
        if not -size <= int(part) < size:
            raise IndexError(f"index {part} is out of range for dim {dim} of size {size}")
        found.source.append(None)


def _place_tensors(found: _Index) -> None:
    """Index tensors are broadcast together; their dims stand where they were if adjacent, else in front."""
    if not found.tensors:
        return
    shape = broadcast_shape(*(t.shape for t in found.tensors.values()))
    at = found.places[0] if len(set(found.places)) == 1 else 0
    found.result[at:at] = [("index", i) for i in range(len(shape))]
    found.shape[at:at] = shape


def _operands(found: _Index) -> dict[Path, Sequence[Label]]:
    operands: dict[Path, Sequence[Label]] = {"input": found.source}
    shape = broadcast_shape(*(t.shape for t in found.tensors.values()))
    for path, t in found.tensors.items():
        operands[path] = [None if label is None else ("index", label) for label in broadcast_labels(t, shape)]
    return operands


@register_distributed_op("getitem")
class GetItem(DistributedOp):
    """Basic indexing and integer tensors. On sharded dims only full slices; a Partial stays one."""

    signature = "input, index"

    def plan(self, call: OpCall) -> OpPlan:
        found = read_index(self, call)
        aligned = align(self, call, _operands(found), "multiply")
        output = aligned.output(call, found.result, found.shape)
        return OpPlan(output, aligned.inputs, dict.fromkeys(found.whole, slice(None)))


@register_distributed_op("setitem")
class SetItem(DistributedOp):
    """``x[index] = value``: as for reading; the value follows the layout of the region."""

    signature = "input, index, value"

    def plan(self, call: OpCall) -> OpPlan:
        found = read_index(self, call)
        layout: Layout = call.args["input"].layout
        if layout.has_partial:
            raise self.refuse(call, "writing to a Partial tensor; reduce it first")
        operands = _operands(found)
        value = call.args["value"]
        if isinstance(value, TensorArg):
            shape = tuple(found.shape)
            extra = max(len(value.shape) - len(shape), 0)  # leading dims of size 1 are allowed
            if any(s != 1 for s in value.shape[:extra]) or broadcast_shape(value.shape[extra:], shape) != shape:
                raise ValueError(f"{call.describe()}: the value cannot be broadcast to {shape}")
            positions = broadcast_labels(value, shape)
            operands["value"] = [found.result[i] if isinstance(i, int) else None for i in positions]
        aligned = align(self, call, operands)
        if aligned.inputs["input"] != layout:
            raise self.refuse(call, "the value is sharded where the tensor is not")
        return OpPlan(layout, aligned.inputs, dict.fromkeys(found.whole, slice(None)))


@register_distributed_op("select")
class Select(DistributedOp):
    """One index of a dim, which must be whole."""

    signature = "input, dim, index"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        dim = normal_dim(call.args["dim"], layout.ndim)
        require_whole(self, call, layout, (dim,))
        placements = [Shard(p.dim - (p.dim > dim)) if isinstance(p, Shard) else p for p in layout.placements]
        return OpPlan(layout.replace(placements, layout.shape[:dim] + layout.shape[dim + 1 :]))


@register_distributed_op("narrow")
class Narrow(DistributedOp):
    """A range of a dim, which must be whole."""

    signature = "input, dim, start, length"

    def plan(self, call: OpCall) -> OpPlan:
        source: Layout = reduced(call.args["input"].layout)
        if not isinstance(call.args["start"], Integral):
            raise self.refuse(call, "a start that is not an integer")
        dim = normal_dim(call.args["dim"], source.ndim)
        require_whole(self, call, source, (dim,))
        shape = (*source.shape[:dim], call.args["length"], *source.shape[dim + 1 :])
        return OpPlan(source.replace(shape=shape), {"input": source})
