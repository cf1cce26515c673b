"""The loss kernels as nodes of MindSpore's autograd, which works in PyNative mode only."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor
from mindspore.common._grad_function import _Function

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.mindspore.custom_grad import differentiable_once

__all__ = ["CrossEntropy", "LogSoftmax", "NllLoss"]

Kernels = Any
"""The MindSporeLossKernels that compute."""


class CrossEntropy(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_logits: Tensor,
        kernels: Kernels,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, ...]:
        loss, token_weight, state = kernels.distributed_nll_loss_forward(
            local_logits, dim, target, shard, weight, options
        )
        ctx.save_for_backward(local_logits)
        ctx.kernels, ctx.dim, ctx.state, ctx.spent = kernels, dim, state, False
        ctx.mark_non_differentiable(token_weight)
        # always as many, or backward loses count; what is not asked for is empty
        return loss, token_weight, *kernels.more_outputs(state, target.shape)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor, *more: Tensor) -> Any:
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy(inplace=True) has overwritten the logits with their gradient; backward can run once"
            )
        ctx.spent = ctx.state.options.inplace
        (local_logits,) = ctx.saved_tensors
        options = ctx.state.options
        grad_log_prob = more[0] if options.log_probs else None
        grad_entropy = more[1] if options.entropy else None
        grad = ctx.kernels.fused_nll_log_softmax_backward(
            grad_loss, local_logits, ctx.dim, ctx.state, grad_log_prob, grad_entropy
        )
        return differentiable_once("the class-sharded cross_entropy", grad, grad_loss, *more, local_logits), *[None] * 6


class LogSoftmax(_Function):
    @staticmethod
    def forward(ctx: Any, local_logits: Tensor, kernels: Kernels, dim: int, shard: ClassShard, dtype: Any) -> Tensor:
        log_probs, share = kernels.distributed_log_softmax(local_logits, dim, shard, dtype)
        ctx.save_for_backward(local_logits, share)
        ctx.kernels, ctx.dim, ctx.shard = kernels, dim, shard
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        local_logits, share = ctx.saved_tensors
        out = ctx.kernels.log_softmax_backward(grad, local_logits, ctx.dim, ctx.shard, share)
        return differentiable_once("the class-sharded log_softmax", out, grad, local_logits), *[None] * 4


class NllLoss(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_log_probs: Tensor,
        kernels: Kernels,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        loss, token_weight, state = kernels.nll_loss_forward(local_log_probs, dim, target, shard, weight, options)
        ctx.kernels, ctx.state = kernels, state
        ctx.mark_non_differentiable(token_weight)
        return loss, token_weight

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        grad = ctx.kernels.nll_loss_backward(grad_loss, ctx.state)
        return differentiable_once("the class-sharded nll_loss", grad, grad_loss), *[None] * 6
