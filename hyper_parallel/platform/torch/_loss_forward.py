"""The class-sharded log-softmax and cross-entropy without autograd."""

from __future__ import annotations

import math

import torch

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.loss_statistics import IGNORED
from hyper_parallel.platform.torch._loss_exchange import merge_statistics
from hyper_parallel.platform.torch._loss_gradients import LossState, cross_entropy_grad
from hyper_parallel.platform.torch._loss_overlap import exchanged_statistics
from hyper_parallel.platform.torch._loss_rows import autocast_off, chunks, statistics_dtype
from hyper_parallel.platform.torch._loss_statistics import shard_statistics
from hyper_parallel.platform.torch._loss_targets import place_targets, target_owner

__all__ = ["distributed_log_softmax", "distributed_nll_loss_forward", "fused_nll_log_softmax_backward", "log_prob_of"]


def distributed_log_softmax(
    local_logits: torch.Tensor, dim: int, shard: ClassShard, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K1's forward; see :meth:`LossKernels.distributed_log_softmax`."""
    with torch.no_grad(), autocast_off(local_logits):
        total = merge_statistics(shard_statistics(local_logits, dim)[0], shard.group)
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
        total, exponentials = exchanged_statistics(
            local_logits,
            dim,
            shard.group,
            options.overlap_blocks,
            owner=target_owner(labels, shard),
            target_index=index,
            needed=kept,
            class_weight=class_weight,
            entropy=options.entropy,
        )
        assert total.target_gap is not None

        nll = total.target_gap + total.log_sum_exp
        slope = (1.0 - smoothing) * token_weight
        loss = slope * nll
        uniform = None
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
        unit = total.share / torch.where(exponentials.total == 0, 1.0, exponentials.total)
        slope = torch.where(kept, slope * unit, 0.0)
        outside = kept & ((labels < 0) | (labels >= shard.num_classes))
        loss.masked_fill_(outside, math.nan)  # unvalidated: let it be seen
        slope.masked_fill_(outside, math.nan)
        entropy = None if total.mean is None else torch.where(kept, total.log_sum_exp - total.mean, 0.0)
        state = LossState(
            slope,
            index,
            nll.masked_fill_(outside, math.nan),
            exponentials.anchor,
            weight,
            uniform,
            shard,
            options,
            unit if options.log_probs or options.entropy else None,
            entropy,
            total.reference if options.entropy else None,
            total.log_sum_exp if options.entropy else None,
        )
        return loss.view(target.shape), token_weight.view(target.shape), state


def fused_nll_log_softmax_backward(
    grad_loss: torch.Tensor,
    local_logits: torch.Tensor,
    dim: int,
    state: LossState,
    grad_log_prob: torch.Tensor | None = None,
    grad_entropy: torch.Tensor | None = None,
) -> torch.Tensor:
    """K3; see :meth:`LossKernels.fused_nll_log_softmax_backward`."""
    with torch.no_grad(), autocast_off(local_logits):
        return cross_entropy_grad(grad_loss, local_logits, dim, state, grad_log_prob, grad_entropy)


def log_prob_of(state: LossState, shape: torch.Size) -> torch.Tensor:
    """``log p_y`` of each token, 0 where ignored."""
    return torch.where(state.target_index == IGNORED, 0.0, -state.nll).view(shape)


def _smoothing_weight(
    shard: ClassShard, weight: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``w_c`` of the local classes: ones without weights."""
    if weight is None:
        return torch.ones(shard.stop - shard.start, dtype=dtype, device=like.device)
    return weight[shard.start : shard.stop].to(dtype)
