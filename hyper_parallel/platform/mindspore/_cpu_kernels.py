"""Operators on local tensors whose CPU kernels are wrong or missing, computed another way.

Sums over nothing: MindSpore leaves the result uninitialised, here it is zero. log_softmax: MindSpore's gradient is off
by 1e-4, and the newer primitive has no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, _no_grad, ops
from mindspore.common._grad_function import _Function

__all__ = ["needs_care", "run"]

_SUMS = frozenset(
    {
        "SumExt",
        "ReduceSum",
        "DeprecatedSum",
        "MatMul",
        "MatMulExt",
        "BatchMatMul",
        "BatchMatMulExt",
        "Mm",
        "Dense",
    }
)
_LOG_SOFTMAX = frozenset({"LogSoftmax", "LogSoftmaxExt"})


def needs_care(name: str, args: Sequence[Any]) -> bool:
    """Whether :func:`run` is to run this call."""
    if name in _SUMS:
        return any(isinstance(a, Tensor) and a.size == 0 for a in args)
    if name in _LOG_SOFTMAX:
        return mindspore.get_context("device_target") == "CPU" and args[0].ndim > 0
    return False


def run(name: str, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The operator's result, on the graph of its operands."""
    if name in _LOG_SOFTMAX:
        return _log_softmax(op_call, args, kwargs)
    with _no_grad():
        template = op_call(*args, **kwargs)
    zeros: Tensor = _Zeros.apply(template, *[a for a in args if isinstance(a, Tensor)])
    if name == "Dense" and len(args) > 2 and args[2] is not None:
        return ops.add(zeros, args[2])
    return zeros


def _log_softmax(op_call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    from hyper_parallel.loss_parallel.kernel_spec import ClassShard
    from hyper_parallel.platform import get_platform
    from hyper_parallel.platform.mindspore.loss_arguments import bind

    call = bind("log_softmax", op_call, args, kwargs)
    x = call.input
    dim = call.dim % max(x.ndim, 1)  # type: ignore[operator]
    classes = x.shape[dim]
    kernels = get_platform().loss_kernels
    return kernels.log_softmax(x, dim, ClassShard(0, classes, classes), dtype=call.dtype, validate=False)


class _Zeros(_Function):
    @staticmethod
    def forward(ctx: Any, template: Tensor, *inputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype) for x in inputs]
        return ops.zeros(template.shape, template.dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *(ops.zeros(shape, dtype) for shape, dtype in ctx.like)
