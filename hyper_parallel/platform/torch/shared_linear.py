"""A linear layer whose input is replicated and whose output is sharded, with overlap in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch.custom_grad import differentiable_once

__all__ = ["shared_linear"]


def shared_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group
) -> torch.Tensor:
    """``F.linear(x, weight, bias)`` on this rank's rows of the weight.

    Backward starts the all-reduce of the gradient of ``x``, computes that of the weight meanwhile, then
    waits. The gradient has no derivative: differentiating it raises.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):  # the casts of F.linear, where they have a backward
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    result: torch.Tensor = _SharedLinear.apply(x, weight, bias, group)
    return result


class _SharedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            found = _SharedLinear._gradients(ctx, grad, x, weight)
        name = "a column-parallel linear layer"
        return *(None if g is None else differentiable_once(name, g, grad, x, weight) for g in found), None

    @staticmethod
    def _gradients(
        ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        count = x.shape[:-1].numel()  # said, because a rank may have no output features
        rows = grad.reshape(count, grad.shape[-1])
        grad_x, work = None, None
        if needs_x:
            grad_x = (rows @ weight).view(x.shape)
            work = dist.all_reduce(grad_x, group=ctx.group.handle, async_op=True)
        grad_weight = rows.t() @ x.reshape(count, x.shape[-1]) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias else None
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias
