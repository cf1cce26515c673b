"""The statistics of each token's logits over this rank's classes."""

from __future__ import annotations

import math

import torch

from hyper_parallel.platform import loss_statistics
from hyper_parallel.platform.torch._loss_entropy import expectation
from hyper_parallel.platform.torch._loss_fused import fused_kernels
from hyper_parallel.platform.torch._loss_rows import chunks, exp_rows, load_rows, matrices, statistics_dtype
from hyper_parallel.platform.torch._loss_targets import at_index

__all__ = ["ShardStatistics", "finite_or_zero", "shard_statistics"]


ShardStatistics = loss_statistics.ShardStatistics[torch.Tensor]


def shard_statistics(
    logits: torch.Tensor,
    dim: int,
    *,
    target_index: torch.Tensor | None = None,
    needed: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    entropy: bool = False,
) -> ShardStatistics:
    """One pass over this rank's logits.

    Args:
        target_index: per token, where its target's class stands among the local ones; negative where it does
            not.
        needed: which tokens matter; on CPU, chunks of tokens that do not are skipped.
        class_weight: ``w_c`` of the local classes, when the smoothing terms are wanted.
        entropy: whether what the entropy needs is wanted.
    """
    dtype = statistics_dtype(logits)
    tokens = math.prod(logits.shape[:dim] + logits.shape[dim + 1 :])
    maximum = logits.new_full((tokens,), -math.inf, dtype=dtype)
    sum_exp = torch.zeros_like(maximum)
    shortfall = None if class_weight is None else torch.zeros_like(maximum)
    mean = torch.zeros_like(maximum) if entropy else None
    skip = needed is not None and needed.device.type == "cpu" and not bool(needed.all())
    fused = None if entropy or shortfall is not None else fused_kernels(dim, logits)
    if fused is not None:
        for first, (rows,) in matrices(dim, logits):
            part = slice(first, first + len(rows))
            maximum[part], sum_exp[part] = fused.row_statistics(rows, dtype)
    for start, stop, (rows,), buffer in chunks(dim, logits) if fused is None else ():
        if skip and needed is not None and not bool(needed[start:stop].any()):
            continue
        loaded = load_rows(rows, buffer)
        torch.amax(loaded, 1, out=maximum[start:stop])
        anchor = finite_or_zero(maximum[start:stop])
        exp_rows(loaded, anchor, buffer)
        torch.sum(buffer, 1, out=sum_exp[start:stop])
        if mean is not None:
            mean[start:stop] = expectation(buffer, rows, anchor) / sum_exp[start:stop]
        if shortfall is not None and class_weight is not None:
            torch.sub(anchor[:, None], rows, out=buffer)
            torch.sum(buffer.mul_(class_weight), 1, out=shortfall[start:stop])
    return ShardStatistics(
        maximum,
        sum_exp,
        None if target_index is None else at_index(logits, dim, target_index),
        shortfall,
        None if class_weight is None else class_weight.sum(),
        None if mean is None else torch.where(maximum == -math.inf, 0.0, mean),
    )


def finite_or_zero(maximum: torch.Tensor) -> torch.Tensor:
    """The maximum, or 0 where there is no class or nothing but -inf: a point that can be subtracted from."""
    return torch.where(maximum == -math.inf, 0.0, maximum)
