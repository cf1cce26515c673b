"""Matrix products in all their spellings: one rule over labelled dims.

``S(contracted) x S(contracted) -> Partial``; a dim that only one operand has may be sharded, the other operand is
whole there; ``Partial x Replicate -> Partial``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, Path, TensorArg
from hyper_parallel.core.shard.ops._alignment import Label, align, align_added, argument, broadcast_labels
from hyper_parallel.core.shard.ops._shapes import broadcast_shape
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

__all__ = ["Einsum", "Linear", "Matmul", "MatmulAdd"]


def matmul_dims(call: OpCall, a: Path, b: Path) -> tuple[dict[Path, list[Label]], list[Label], tuple[int, ...]]:
    """Labels of both operands and of the result, and the result's shape, with the rules of ``torch.matmul``.

    Arguments ``transpose_a`` and ``transpose_b``, where there are such, swap the last two dims of an operand.
    """
    left, right = argument(call, a), argument(call, b)
    flipped = bool(call.args.get("transpose_a")), bool(call.args.get("transpose_b"))
    own: dict[Path, list[Label]] = {}
    sizes: list[dict[Label, int]] = []
    batch = broadcast_shape(left.shape[:-2], right.shape[:-2])
    for path, arg, matrix, flip in ((a, left, ["m", "k"], flipped[0]), (b, right, ["k", "n"], flipped[1])):
        last: list[Label] = ["k"] if len(arg.shape) == 1 else [*(reversed(matrix) if flip else matrix)]
        own[path] = [*(_batch_labels(arg, batch) if len(arg.shape) > 1 else []), *last]
        sizes.append(dict(zip(last, arg.shape[-len(last) :])))
    if not left.shape or not right.shape or sizes[0]["k"] != sizes[1]["k"]:
        raise ValueError(f"{call.describe()}: shapes {left.shape} and {right.shape} cannot be multiplied")
    rows = [("m", sizes[0]["m"])] if "m" in sizes[0] else []
    columns = [("n", sizes[1]["n"])] if "n" in sizes[1] else []
    labels: list[Label] = [*range(len(batch)), *(label for label, _ in rows + columns)]
    return own, labels, (*batch, *(size for _, size in rows + columns))


def _batch_labels(arg: TensorArg, batch: tuple[int, ...]) -> list[Label]:
    return broadcast_labels(arg, (*batch, *arg.shape[-2:]))[:-2]


@register_distributed_op("matmul")
class Matmul(DistributedOp):
    """matmul, mm, bmm, mv, dot. Options: ``operands``: the names of both; ``swapped``: the second times the first."""

    signature = "input, other"

    def plan(self, call: OpCall) -> OpPlan:
        a, b = call.options.get("operands", ("input", "other"))
        if call.options.get("swapped"):
            a, b = b, a
        operands, labels, shape = matmul_dims(call, a, b)
        aligned = align(self, call, operands, "multiply")
        return OpPlan(aligned.output(call, labels, shape), aligned.inputs)


@register_distributed_op("matmul_add")
class MatmulAdd(DistributedOp):
    """addmm, baddbmm, addmv: ``beta * input + alpha * (a @ b)``. Option ``operands``: the names of a and b.

    ``input`` follows the product: it is sliced where the product is sharded, and added on one rank where the product is
    Partial.
    """

    signature = "input, mat1, mat2, *, beta=1, alpha=1"

    def plan(self, call: OpCall) -> OpPlan:
        a, b = call.options.get("operands", ("mat1", "mat2"))
        operands, labels, shape = matmul_dims(call, a, b)
        aligned = align(self, call, operands, "multiply")
        output = aligned.output(call, labels, shape)
        added = argument(call, "input")
        if broadcast_shape(added.shape, shape) != shape:
            raise ValueError(f"{call.describe()}: input cannot be broadcast to {shape}")
        target = align_added(self, call, "input", broadcast_labels(added, shape), output)
        return OpPlan(output, {**aligned.inputs, "input": target})


@register_distributed_op("linear")
class Linear(DistributedOp):
    """``input @ weight.T + bias``: column parallel for ``weight: S(0)``, row parallel (Partial result) for ``S(1)``.

    The bias is added once: where the result is Partial, on one rank of the mesh dim.
    """

    signature = "input, weight, bias=None"

    def plan(self, call: OpCall) -> OpPlan:
        x, weight = argument(call, "input"), argument(call, "weight")
        if not x.shape or x.shape[-1] != weight.shape[-1]:
            raise ValueError(f"{call.describe()}: shapes {x.shape} and {weight.shape} cannot be multiplied")
        rows: list[Label] = list(range(len(x.shape) - 1))
        columns: list[Label] = ["n"] if len(weight.shape) == 2 else []
        operands: dict[Path, Sequence[Label]] = {"input": [*rows, "k"], "weight": [*columns, "k"]}
        aligned = align(self, call, operands, "multiply")
        shape = (*x.shape[:-1], *weight.shape[:-1])
        output = aligned.output(call, rows + columns, shape)
        inputs: dict[Path, Layout] = dict(aligned.inputs)
        if call.args["bias"] is not None:
            inputs["bias"] = align_added(self, call, "bias", [len(shape) - 1] if columns else [], output)
        return OpPlan(output, inputs)


@register_distributed_op("einsum")
class Einsum(DistributedOp):
    """``einsum("bsh,vh->bsv", x, w)``: letters are the labels; an ellipsis is not supported."""

    signature = "equation, *operands"

    def plan(self, call: OpCall) -> OpPlan:
        equation = call.args["equation"]
        if not isinstance(equation, str) or "." in equation:
            raise self.refuse(call, "expected an equation in letters, without an ellipsis")
        left, arrow, right = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        sizes = _sizes(call, terms)
        if not arrow:
            letters = left.replace(",", "")
            right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
        operands: Mapping[Path, Sequence[Label]] = {("operands", i): list(term) for i, term in enumerate(terms)}
        aligned = align(self, call, operands, "multiply")
        return OpPlan(aligned.output(call, list(right), [sizes[c] for c in right]), aligned.inputs)


def _sizes(call: OpCall, terms: Sequence[str]) -> dict[str, int]:
    tensors = [t for _, t in call.tensors()]
    sizes: dict[str, int] = {}
    for term, t in zip(terms, tensors, strict=True):
        for letter, size in zip(term, t.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{call.describe()}: {letter!r} has sizes {sizes[letter]} and {size}")
    return sizes
