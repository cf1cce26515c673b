"""A linear layer whose input is replicated and whose output is sharded."""

from __future__ import annotations

from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore import _cpu_kernels, collectives
from hyper_parallel.platform.mindspore.custom_grad import linear_map
from hyper_parallel.platform.platform import Group

__all__ = ["linear", "shared_linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``; a weight without rows or columns is taken too."""
    y = _cpu_kernels.call("Dense", ops.dense, (x, weight), {})
    return y if bias is None else _cpu_kernels.call("Add", ops.add, (y, bias), {})


def shared_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """:func:`linear` on this rank's rows of the weight.

    Backward sums the gradient of ``x`` over the group; that this overlaps with the weight's gradient is left to the
    device. The gradient can be differentiated again.
    """
    if group.size == 1:
        return linear(x, weight, bias)
    shared = linear_map(x, lambda v: v, lambda grad: collectives.all_reduce(grad, "sum", group))
    return linear(shared, weight, bias)
