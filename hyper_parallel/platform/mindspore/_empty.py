"""Sums over nothing. MindSpore's CPU kernels leave the result of such a sum uninitialised; here it is zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspore import Tensor, _no_grad, ops
from mindspore.common._grad_function import _Function

__all__ = ["needs_care", "run"]

_SUMS = frozenset(
    {"SumExt", "ReduceSum", "DeprecatedSum", "MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Mm", "Dense"}
)  # fmt: skip


def needs_care(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator on local tensors may sum over nothing, in its gradients too."""
    return name in _SUMS and any(isinstance(a, Tensor) and a.size == 0 for a in args)


def run(name: str, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The operator's result for empty operands: zeros (plus the bias), on the graph of all operands."""
    with _no_grad():
        template = op_call(*args, **kwargs)
    tensors = [a for a in args if isinstance(a, Tensor)]
    zeros: Tensor = _Zeros.apply(template, *tensors)
    if name == "Dense" and len(args) > 2 and args[2] is not None:
        return ops.add(zeros, args[2])
    return zeros


class _Zeros(_Function):
    @staticmethod
    def forward(ctx: Any, template: Tensor, *inputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype) for x in inputs]
        return ops.zeros(template.shape, template.dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *(ops.zeros(shape, dtype) for shape, dtype in ctx.like)
