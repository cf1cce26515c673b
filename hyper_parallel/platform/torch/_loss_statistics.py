"""The statistics of each token's logits over this rank's classes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hyper_parallel.platform import loss_statistics
from hyper_parallel.platform.torch._loss_entropy import expectation
from hyper_parallel.platform.torch._loss_fused import fused_kernels
from hyper_parallel.platform.torch._loss_rows import chunks, exp_rows, load_rows, matrices, statistics_dtype
from hyper_parallel.platform.torch._loss_targets import at_index

__all__ = ["Exponentials", "ShardStatistics", "finite_or_zero", "shard_statistics"]


ShardStatistics = loss_statistics.ShardStatistics[torch.Tensor]

_SMALLEST_SUM, _LARGEST_SUM = 2.0**-24, 2.0**64
"""Between these ``sum_c exp(x_c)`` is as exact as the sum relative to the maximum: nothing has overflowed, and what has
underflowed is less than 1e-30 of it."""


class Exponentials(NamedTuple):
    """What softmax is made of, per token: ``softmax(x)_c = exp(x_c - anchor) / total`` over this rank's classes."""

    anchor: torch.Tensor
    total: torch.Tensor


def shard_statistics(
    logits: torch.Tensor,
    dim: int,
    *,
    target_index: torch.Tensor | None = None,
    needed: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    entropy: bool = False,
) -> tuple[ShardStatistics, Exponentials]:
    """One pass over this rank's logits.

    Args:
        target_index: per token, where its target's class stands among the local ones; negative where it does
            not.
        needed: which tokens matter; on CPU, those that do not are skipped where that is easy.
        class_weight: ``w_c`` of the local classes, when the smoothing terms are wanted.
        entropy: whether what the entropy needs is wanted.
    """
    dtype = statistics_dtype(logits)
    tokens = math.prod(logits.shape[:dim] + logits.shape[dim + 1 :])
    reference = logits.new_full((tokens,), -math.inf, dtype=dtype)
    sum_exp = torch.zeros_like(reference)
    shortfall = None if class_weight is None else torch.zeros_like(reference)
    mean = torch.zeros_like(reference) if entropy else None
    on_cpu = logits.device.type == "cpu"
    missing = needed if on_cpu else None
    direct = found = None
    fused = None if entropy or shortfall is not None else fused_kernels(dim, logits)
    if fused is not None:
        for first, (rows,) in matrices(dim, logits):
            part = slice(first, first + len(rows))
            wanted = None if missing is None else missing[part]
            reference[part], sum_exp[part] = fused.row_statistics(rows, dtype, wanted)
    elif on_cpu and mean is None and shortfall is None:
        direct, found = _sums_of_exponentials(logits, dim, needed)
        torch.where(found, direct.log(), reference, out=reference)
        torch.where(found, direct * torch.exp(-reference), sum_exp, out=sum_exp)
        missing = ~found if needed is None else needed & ~found
    done = fused is not None or (missing is not None and not bool(missing.any()))
    for start, stop, (rows,), buffer in () if done else chunks(dim, logits):
        if missing is not None and not bool(missing[start:stop].any()):
            continue
        if found is not None:
            found[start:stop] = False
        loaded = load_rows(rows, buffer)
        torch.amax(loaded, 1, out=reference[start:stop])
        anchor = finite_or_zero(reference[start:stop])
        exp_rows(loaded, anchor, buffer)
        torch.sum(buffer, 1, out=sum_exp[start:stop])
        if mean is not None:
            mean[start:stop] = expectation(buffer, rows, anchor) / sum_exp[start:stop]
        if shortfall is not None and class_weight is not None:
            torch.sub(anchor[:, None], rows, out=buffer)
            torch.sum(buffer.mul_(class_weight), 1, out=shortfall[start:stop])
    statistics = ShardStatistics(
        reference,
        sum_exp,
        None if target_index is None else at_index(logits, dim, target_index),
        shortfall,
        None if class_weight is None else class_weight.sum(),
        None if mean is None else torch.where(reference == -math.inf, 0.0, mean),
    )
    exponentials = Exponentials(finite_or_zero(reference), sum_exp)
    if direct is not None and found is not None:
        anchor, total = exponentials
        exponentials = Exponentials(torch.where(found, 0.0, anchor), torch.where(found, direct, total))
    return statistics, exponentials


def finite_or_zero(maximum: torch.Tensor) -> torch.Tensor:
    """The maximum, or 0 where there is no class or nothing but -inf: a point that can be subtracted from."""
    return torch.where(maximum == -math.inf, 0.0, maximum)


def _sums_of_exponentials(
    logits: torch.Tensor, dim: int, needed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sum_c exp(x_c)`` per token, and where it is good enough.

    Almost always it is, and two passes over each row are saved: the one that looks for the maximum, and the one that
    subtracts it. Where the first chunk shows that it is not, the others are not tried.
    """
    tokens = math.prod(logits.shape[:dim] + logits.shape[dim + 1 :])
    sums = torch.zeros(tokens, dtype=statistics_dtype(logits))
    tried = False
    for start, stop, (rows,), buffer in chunks(dim, logits):
        if needed is not None and not bool(needed[start:stop].any()):
            continue
        torch.exp(load_rows(rows, buffer), out=buffer)
        torch.sum(buffer, 1, out=sums[start:stop])
        if not tried and not bool(_in_range(sums[start:stop]).any()):
            break
        tried = True
    return sums, _in_range(sums)


def _in_range(sums: torch.Tensor) -> torch.Tensor:
    return (sums >= _SMALLEST_SUM) & (sums <= _LARGEST_SUM)
