"""Class-sharded log-softmax and cross-entropy in PyTorch, as ``loss_parallel/kernel_spec.py`` describes them.

Everything walks over the logits in chunks of rows (``_loss_rows``); a chunk's softmax gives a row's
statistics in the forward (``_loss_statistics``) and, taken again in the backward, its gradient
(``_loss_gradients``).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hyper_parallel.loss_parallel.kernel_spec import ClassShard, LossKernels, LossOptions
from hyper_parallel.platform.torch import _loss_facts as loss_facts
from hyper_parallel.platform.torch._loss_exchange import merge_statistics
from hyper_parallel.platform.torch._loss_gradients import (
    LossState,
    cross_entropy_grad,
    log_softmax_grad,
    sum_over_classes,
)
from hyper_parallel.platform.torch._loss_rows import autocast_off, chunks, statistics_dtype
from hyper_parallel.platform.torch._loss_statistics import shard_statistics
from hyper_parallel.platform.torch._loss_targets import IGNORED, at_index, place_targets, put_at_index, target_owner
from hyper_parallel.platform.torch.collectives import all_reduce

__all__ = [
    "TorchLossKernels",
    "distributed_log_softmax",
    "distributed_nll_loss_forward",
    "fused_nll_log_softmax_backward",
]


def distributed_log_softmax(
    local_logits: torch.Tensor, dim: int, shard: ClassShard, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K1's forward; see :meth:`LossKernels.distributed_log_softmax`."""
    with torch.no_grad(), autocast_off(local_logits):
        total = merge_statistics(shard_statistics(local_logits, dim), shard.group)
        out = torch.empty_like(local_logits, dtype=dtype or local_logits.dtype)
        for start, stop, (rows, result), buffer in chunks(dim, local_logits, out):
            torch.sub(rows, total.reference[start:stop, None], out=buffer)
            result.copy_(buffer.sub_(total.log_sum_exp[start:stop, None]))
        return out, total.share


def distributed_nll_loss_forward(
    local_logits: torch.Tensor,
    dim: int,
    target: torch.Tensor,
    shard: ClassShard,
    weight: torch.Tensor | None,
    options: LossOptions,
) -> tuple[torch.Tensor, torch.Tensor, LossState]:
    """K2's forward; see :meth:`LossKernels.distributed_nll_loss_forward`."""
    with torch.no_grad(), autocast_off(local_logits):
        dtype = statistics_dtype(local_logits)
        labels = target.reshape(-1).long()
        index, token_weight = place_targets(labels, shard, weight, options.ignore_index, dtype)
        kept = index != IGNORED
        smoothing = options.label_smoothing
        class_weight = _smoothing_weight(shard, weight, index, dtype) if smoothing else None
        local = shard_statistics(
            local_logits, dim, target_index=index, needed=kept, class_weight=class_weight
        )
        total = merge_statistics(local, shard.group, owner=target_owner(labels, shard))
        assert total.target_gap is not None

        nll = total.target_gap + total.log_sum_exp
        slope = (1.0 - smoothing) * token_weight
        loss = slope * nll
        uniform = lse = None
        if total.shortfall is not None and total.weight_sum is not None:
            factor = smoothing / max(shard.num_classes, 1)
            uniform = factor * total.weight_sum
            loss = loss + uniform * total.log_sum_exp + factor * total.shortfall
            slope = slope + uniform
        if options.z_loss:
            lse = total.reference + total.log_sum_exp
            loss = loss + options.z_loss * lse * lse
            slope = slope + 2.0 * options.z_loss * lse
        loss = torch.where(kept, loss, 0.0)
        slope = torch.where(kept, slope * total.share, 0.0)
        outside = kept & ((labels < 0) | (labels >= shard.num_classes))
        loss.masked_fill_(outside, math.nan)  # unvalidated: let it be seen
        slope.masked_fill_(outside, math.nan)
        state = LossState(slope, index, nll, lse, weight, uniform, shard, options)
        return loss.view(target.shape), token_weight.view(target.shape), state


def fused_nll_log_softmax_backward(
    grad_loss: torch.Tensor, local_logits: torch.Tensor, dim: int, state: LossState
) -> torch.Tensor:
    """K3; see :meth:`LossKernels.fused_nll_log_softmax_backward`."""
    with torch.no_grad(), autocast_off(local_logits):
        return cross_entropy_grad(grad_loss, local_logits, dim, state)


class TorchLossKernels(LossKernels):
    """The kernels on any device of PyTorch, under autograd."""

    def log_softmax(
        self,
        local_logits: torch.Tensor,
        dim: int,
        shard: ClassShard,
        *,
        dtype: torch.dtype | None = None,
        validate: bool | None = None,
    ) -> torch.Tensor:
        self._ensure_valid(
            "log_softmax", local_logits, dim, None, shard, None, LossOptions(validate=validate)
        )
        if dtype is None and torch.is_autocast_enabled(local_logits.device.type):
            dtype = statistics_dtype(local_logits)  # what autocast does with log_softmax
        if dtype == torch.float64:  # PyTorch casts first, so the statistics have that precision as well
            local_logits = local_logits.to(dtype)
        return _LogSoftmax.apply(local_logits, dim, shard, dtype)

    def cross_entropy(
        self,
        local_logits: torch.Tensor,
        dim: int,
        target: torch.Tensor,
        shard: ClassShard,
        weight: torch.Tensor | None,
        options: LossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._ensure_valid("cross_entropy", local_logits, dim, target, shard, weight, options)
        return _CrossEntropy.apply(local_logits, dim, target, shard, weight, options)

    def nll_loss(
        self,
        local_log_probs: torch.Tensor,
        dim: int,
        target: torch.Tensor,
        shard: ClassShard,
        weight: torch.Tensor | None,
        options: LossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._ensure_valid("nll_loss", local_log_probs, dim, target, shard, weight, options)
        return _NllLoss.apply(local_log_probs, dim, target, shard, weight, options)

    distributed_log_softmax = staticmethod(distributed_log_softmax)  # type: ignore[assignment]
    distributed_nll_loss_forward = staticmethod(distributed_nll_loss_forward)  # type: ignore[assignment]
    fused_nll_log_softmax_backward = staticmethod(fused_nll_log_softmax_backward)  # type: ignore[assignment]

    _describe = staticmethod(loss_facts.describe)  # type: ignore[assignment]
    _read_values = staticmethod(loss_facts.read_values)  # type: ignore[assignment]
    _exchange_headers = staticmethod(loss_facts.exchange_headers)  # type: ignore[assignment]

    def validates_by_default(self, local_logits: torch.Tensor) -> bool:
        return local_logits.device.type == "cpu"


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_logits: torch.Tensor,
        dim: int,
        target: torch.Tensor,
        shard: ClassShard,
        weight: torch.Tensor | None,
        options: LossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, token_weight, state = distributed_nll_loss_forward(
            local_logits, dim, target, shard, weight, options
        )
        ctx.save_for_backward(local_logits, state.slope, state.target_index, state.nll, state.lse, weight)
        ctx.dim, ctx.shard, ctx.options, ctx.smoothing, ctx.spent = (
            dim,
            shard,
            options,
            state.smoothing,
            False,
        )
        ctx.mark_non_differentiable(token_weight)
        return loss, token_weight

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy(inplace=True) has overwritten the logits with their gradient; "
                "backward can run once"
            )
        ctx.spent = ctx.options.inplace
        local_logits, slope, index, nll, lse, weight = ctx.saved_tensors
        state = LossState(slope, index, nll, lse, weight, ctx.smoothing, ctx.shard, ctx.options)
        grad = fused_nll_log_softmax_backward(grad_loss, local_logits, ctx.dim, state)
        return (
            _differentiable_once("cross_entropy", grad, grad_loss, local_logits),
            None,
            None,
            None,
            None,
            None,
        )


class _LogSoftmax(torch.autograd.Function):
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
        return _differentiable_once("log_softmax", grad_logits, grad, local_logits), None, None, None


class _NllLoss(torch.autograd.Function):
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
        return _differentiable_once("nll_loss", grad, grad_loss), None, None, None, None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, grad: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError(
            f"the class-sharded {ctx.name} cannot be differentiated twice: its gradient has no derivative"
        )


def _differentiable_once(name: str, grad: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """``grad``, under ``create_graph=True`` tied to what it depends on: differentiating it raises."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Once.apply(name, grad, *inputs)
    return grad


def _smoothing_weight(
    shard: ClassShard, weight: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``w_c`` of the local classes: ones without weights."""
    if weight is None:
        return torch.ones(shard.stop - shard.start, dtype=dtype, device=like.device)
    return weight[shard.start : shard.stop].to(dtype)
