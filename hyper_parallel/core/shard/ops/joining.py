"""cat, stack, and their inverses split, chunk, unbind, along dims that are whole."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, Path, TensorArg
from hyper_parallel.core.shard.ops._alignment import Label, align
from hyper_parallel.core.shard.ops._shapes import normal_dim
from hyper_parallel.core.shard.ops.along_dim import require_whole
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["Cat", "Chunk", "Split", "Stack", "Unbind"]


def _tensors(op: DistributedOp, call: OpCall) -> list[tuple[Path, TensorArg]]:
    found: list[tuple[Path, TensorArg]] = [
        (path, t) for path, t in call.tensors() if not isinstance(path, str) and path[0] == "tensors"
    ]
    if len(found) != len(call.args["tensors"]) or not found:
        raise op.refuse(call, "expected a sequence of tensors")
    return found


@register_distributed_op("cat")
class Cat(DistributedOp):
    """Concatenate along a dim that is whole; where one tensor is Partial, all become it."""

    signature = "tensors, dim=0"

    def plan(self, call: OpCall) -> OpPlan:
        found = _tensors(self, call)
        empty = [path for path, t in found if t.shape == (0,)]  # skipped by cat, whatever the others look like
        shaped = [(path, t) for path, t in found if t.shape != (0,)] or found
        shape = list(shaped[0][1].shape)
        dim = normal_dim(call.args["dim"], len(shape))
        labels: list[Label] = [d if d != dim else None for d in range(len(shape))]
        total = 0
        for _, t in shaped:
            if [s for d, s in enumerate(t.shape) if d != dim] != [s for d, s in enumerate(shape) if d != dim]:
                raise ValueError(f"{call.describe()}: shapes differ beside dim {dim}")
            total += t.shape[dim]
        operands: dict[Path, Sequence[Label]] = {path: labels for path, _ in shaped}
        operands.update({path: [None] for path in empty if path not in operands})
        aligned = align(self, call, operands, "add")
        shape[dim] = total
        return OpPlan(aligned.output(call, labels, shape), aligned.inputs)


@register_distributed_op("stack")
class Stack(DistributedOp):
    """Stack along a new dim; where one tensor is Partial, all become it."""

    signature = "tensors, dim=0"

    def plan(self, call: OpCall) -> OpPlan:
        found = _tensors(self, call)
        shape = found[0][1].shape
        if any(t.shape != shape for _, t in found):
            raise ValueError(f"{call.describe()}: shapes differ")
        dim = normal_dim(call.args["dim"], len(shape) + 1)
        labels: list[Label] = list(range(len(shape)))
        aligned = align(self, call, {path: labels for path, _ in found}, "add")
        new_labels = [*labels[:dim], "new", *labels[dim:]]
        return OpPlan(aligned.output(call, new_labels, (*shape[:dim], len(found), *shape[dim:])), aligned.inputs)


@register_distributed_op("split")
class Split(DistributedOp):
    """Pieces of given sizes of a dim that is whole."""

    signature = "input, split_size_or_sections, dim=0"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        dim = normal_dim(call.args["dim"], layout.ndim)
        require_whole(self, call, layout, (dim,))
        sizes = self.sizes(call, layout.shape[dim])
        shapes = [(*layout.shape[:dim], s, *layout.shape[dim + 1 :]) for s in sizes]
        return OpPlan([layout.replace(shape=shape) for shape in shapes])

    def sizes(self, call: OpCall, size: int) -> list[int]:
        """Sizes of the pieces of a dim of ``size``."""
        given = call.args["split_size_or_sections"]
        return list(given) if isinstance(given, (list, tuple)) else _pieces(size, given)


@register_distributed_op("chunk")
class Chunk(Split):
    """At most so many pieces of equal size, the last one smaller."""

    signature = "input, chunks, dim=0"

    def sizes(self, call: OpCall, size: int) -> list[int]:
        chunks = call.args["chunks"]
        return [0] * chunks if size == 0 else _pieces(size, -(-size // chunks))


@register_distributed_op("unbind")
class Unbind(DistributedOp):
    """Every index of a dim that is whole."""

    signature = "input, dim=0"

    def plan(self, call: OpCall) -> OpPlan:
        layout: Layout = call.args["input"].layout
        dim = normal_dim(call.args["dim"], layout.ndim)
        require_whole(self, call, layout, (dim,))
        placements = [Shard(p.dim - (p.dim > dim)) if isinstance(p, Shard) else p for p in layout.placements]
        piece = layout.replace(placements, layout.shape[:dim] + layout.shape[dim + 1 :])
        return OpPlan([piece] * layout.shape[dim])


def _pieces(size: int, length: int) -> list[int]:
    return [min(length, size - start) for start in range(0, size, length)] if size and length else [size]
