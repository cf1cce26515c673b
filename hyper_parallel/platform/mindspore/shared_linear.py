"""A linear layer whose input is replicated and whose output is sharded, with overlap in backward."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.platform.mindspore import _cpu_kernels, collectives
from hyper_parallel.platform.mindspore.custom_grad import as_input, linear_map, requires_grad
from hyper_parallel.platform.platform import Group

__all__ = ["linear", "shared_linear"]

_transposed_product = ops.MatMul(transpose_a=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``; a weight without rows or columns is taken too."""
    y = _cpu_kernels.call("Dense", ops.dense, (x, weight), {})
    return y if bias is None else _cpu_kernels.call("Add", ops.add, (y, bias), {})


def shared_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """:func:`linear` on this rank's rows of the weight.

    Backward starts the all-reduce of the gradient of ``x``, computes that of the weight meanwhile, then waits; where
    the device has no asynchronous one (CPU), one comes after the other. The gradient can be differentiated again.
    """
    if group.size == 1 or not requires_grad(x):
        return linear(x, weight, bias)
    y = _SharedProduct.apply(as_input(x), as_input(weight), group)
    return y if bias is None else _cpu_kernels.call("Add", ops.add, (y, bias), {})


class _SharedProduct(_Function):
    """``x W^T``. The bias is added outside: its gradient is small, and may have another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return linear(x, weight, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight), group = grads, ctx.saved_tensors, ctx.group
        term = _of_input(grad, x, weight)
        if any(requires_grad(t) for t in (grad, x, weight)):  # recorded, for a second derivative
            total = linear_map(term, lambda t: collectives.all_reduce(t, "sum", group), lambda g: g)
            return total, _of_weight(grad, x, weight), None
        wait = collectives.start_all_reduce(term, "sum", group)
        of_weight = _of_weight(grad, x, weight) if ctx.needs_input_grad[1] else None
        return wait(), of_weight, None


def _of_input(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """This rank's term of the gradient of ``x``."""
    product: Tensor = _cpu_kernels.call("MatMul", ops.matmul, (_rows(grad, x), weight), {})
    return product.reshape(x.shape)


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    rows = _rows(grad, x), _rows(x, x)
    product: Tensor = _cpu_kernels.call("MatMul", _transposed_product, rows, {})
    return product


def _rows(values: Tensor, x: Tensor) -> Tensor:
    """As a matrix. The number of rows is said, because a rank may have no features."""
    count = 1
    for size in x.shape[:-1]:
        count *= size
    return values.reshape((count, values.shape[-1]))
