"""The loss kernels as nodes of PyTorch's autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.loss_statistics import IGNORED
from hyper_parallel.platform.torch._loss_forward import (
    distributed_log_softmax,
    distributed_nll_loss_forward,
    fused_nll_log_softmax_backward,
    log_prob_of,
)
from hyper_parallel.platform.torch._loss_gradients import LossState, log_softmax_grad, sum_over_classes
from hyper_parallel.platform.torch._loss_rows import autocast_off, statistics_dtype
from hyper_parallel.platform.torch._loss_targets import at_index, place_targets, put_at_index
from hyper_parallel.platform.torch._sole_holder import is_sole_holder, to_be_saved
from hyper_parallel.platform.torch.collectives import all_reduce
from hyper_parallel.platform.torch.custom_grad import differentiable_once

__all__ = ["CrossEntropy", "LogSoftmax", "NllLoss"]


class CrossEntropy(torch.autograd.Function):
    """Where nobody but this node holds the logits at the time of backward, their gradient takes their memory.

    ``tie`` is :func:`on_the_graph_of` the logits, so that this node notices when it is differentiated twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local_logits: torch.Tensor,
        tie: torch.Tensor,
        dim: int,
        target: torch.Tensor,
        shard: ClassShard,
        weight: torch.Tensor | None,
        options: LossOptions,
    ) -> tuple[torch.Tensor | None, ...]:
        loss, token_weight, state = distributed_nll_loss_forward(
            local_logits, dim, target, shard, weight, options
        )
        kept, ctx.may_be_sole = to_be_saved(local_logits)
        ctx.save_for_backward(kept, tie, weight, *state.tensors)
        ctx.dim, ctx.shard, ctx.options, ctx.smoothing, ctx.spent = dim, shard, options, state.smoothing, False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(token_weight)
        log_prob = log_prob_of(state, target.shape) if options.log_probs else None
        entropy = None if state.entropy is None else state.entropy.clone().view(target.shape)
        return loss, token_weight, log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy(inplace=True) has overwritten the logits with their gradient; "
                "backward can run once"
            )
        ctx.spent = ctx.options.inplace
        local_logits, tie, weight, *tensors = ctx.saved_tensors
        options = ctx.options
        if ctx.may_be_sole and not options.inplace and is_sole_holder(local_logits):
            options = replace(options, inplace=True)
        state = LossState.of(tensors, weight, ctx.smoothing, ctx.shard, options)
        grad_loss, _, grad_log_prob, grad_entropy = grads
        if grad_loss is None:
            grad_loss = torch.zeros_like(state.slope)
        grad = fused_nll_log_softmax_backward(
            grad_loss, local_logits, ctx.dim, state, grad_log_prob, grad_entropy
        )
        given = [g for g in (grad_loss, grad_log_prob, grad_entropy) if g is not None]
        once = differentiable_once("the class-sharded cross_entropy", grad, *given, tie)
        return once, None, None, None, None, None, None


class LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local_logits: torch.Tensor, dim: int, shard: ClassShard, dtype: torch.dtype | None
    ) -> torch.Tensor:
        log_probs, share = distributed_log_softmax(local_logits, dim, shard, dtype)
        ctx.save_for_backward(local_logits, share)
        ctx.dim, ctx.shard = dim, shard
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        local_logits, share = ctx.saved_tensors
        with torch.no_grad(), autocast_off(grad):
            total = sum_over_classes(grad, ctx.dim, share.numel()).to(share.dtype)
            if ctx.shard.group is not None:
                total = all_reduce(total, "sum", ctx.shard.group)
            grad_logits = log_softmax_grad(grad, total, local_logits, ctx.dim, share)
        return differentiable_once("the class-sharded log_softmax", grad_logits, grad, local_logits), None, None, None


class NllLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_log_probs: torch.Tensor,
        dim: int,
        target: torch.Tensor,
        shard: ClassShard,
        weight: torch.Tensor | None,
        options: LossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast_off(local_log_probs):
            dtype = statistics_dtype(local_log_probs)
            labels = target.reshape(-1).long()
            index, token_weight = place_targets(labels, shard, weight, options.ignore_index, dtype)
            log_prob = at_index(local_log_probs, dim, index)
            if shard.group is not None:
                log_prob = all_reduce(log_prob, "sum", shard.group)
            kept = index != IGNORED
            loss = torch.where(kept, -token_weight * log_prob, 0.0)
            loss.masked_fill_(kept & ((labels < 0) | (labels >= shard.num_classes)), math.nan)
        ctx.save_for_backward(index, token_weight)
        ctx.dim, ctx.shape, ctx.dtype = dim, local_log_probs.shape, local_log_probs.dtype
        token_weight = token_weight.view(target.shape)
        ctx.mark_non_differentiable(token_weight)
        return loss.view(target.shape), token_weight

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        index, token_weight = ctx.saved_tensors
        with torch.no_grad(), autocast_off(grad_loss):
            grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad_loss.device)
            put_at_index(grad, ctx.dim, index, -token_weight * grad_loss.reshape(-1))
        return differentiable_once("the class-sharded nll_loss", grad, grad_loss), None, None, None, None, None
