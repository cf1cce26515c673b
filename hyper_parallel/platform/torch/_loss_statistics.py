"""The statistics of each token's logits: over this rank's classes, then over those of all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch._loss_rows import chunks, softmax_rows, statistics_dtype
from hyper_parallel.platform.torch._loss_targets import at_index
from hyper_parallel.platform.torch.collectives import all_gather, all_reduce

__all__ = ["MergedStatistics", "ShardStatistics", "merge_statistics", "shard_statistics"]

_LARGEST_GATHER = 8
"""Up to this many ranks one all-gather is used: two all-reduces send less only in larger groups."""


@dataclass(frozen=True)
class ShardStatistics:
    """Per token (vectors, fp32 or fp64), over the classes of one rank; -inf and zeros where it has none."""

    maximum: torch.Tensor
    sum_exp: torch.Tensor
    """``sum_c exp(x_c - maximum)``."""
    target_logit: torch.Tensor | None = None
    """``x_y``; 0 where another rank holds the target's class."""
    shortfall: torch.Tensor | None = None
    """For smoothing: ``sum_c w_c (a - x_c)``, where a is the maximum, or 0 for a maximum of -inf."""
    weight_sum: torch.Tensor | None = None
    """For smoothing: ``sum_c w_c``, one number."""


@dataclass(frozen=True)
class MergedStatistics:
    """Per token, over the classes of all ranks; bitwise equal on all of them, but for ``share``."""

    maximum: torch.Tensor
    log_sum_exp: torch.Tensor
    """``log sum_c exp(x_c - maximum)``, so that ``lse = maximum + log_sum_exp``."""
    share: torch.Tensor
    """``sum_c p_c`` over this rank's classes: local softmax times this is the softmax over all."""
    target_gap: torch.Tensor | None
    """``maximum - x_y``, so that ``nll = target_gap + log_sum_exp``."""
    shortfall: torch.Tensor | None
    """``sum_c w_c (maximum - x_c)``."""
    weight_sum: torch.Tensor | None
    """``sum_c w_c``."""


def shard_statistics(
    logits: torch.Tensor,
    dim: int,
    *,
    target_index: torch.Tensor | None = None,
    needed: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
) -> ShardStatistics:
    """One pass over this rank's logits.

    Args:
        target_index: per token, where its target's class stands among the local ones; negative where it does
            not.
        needed: which tokens matter; on CPU, chunks of tokens that do not are skipped.
        class_weight: ``w_c`` of the local classes, when the smoothing terms are wanted.
    """
    dtype = statistics_dtype(logits)
    tokens = math.prod(logits.shape[:dim] + logits.shape[dim + 1 :])
    maximum = logits.new_full((tokens,), -math.inf, dtype=dtype)
    peak = torch.full_like(maximum, math.inf)
    shortfall = None if class_weight is None else torch.zeros_like(maximum)
    skip = needed is not None and needed.device.type == "cpu" and not bool(needed.all())
    for start, stop, (rows,), buffer in chunks(dim, logits):
        if skip and needed is not None and not bool(needed[start:stop].any()):
            continue
        softmax_rows(rows, buffer)
        maximum[start:stop] = rows.amax(1)
        torch.amax(buffer, 1, out=peak[start:stop])
        if shortfall is not None and class_weight is not None:
            torch.sub(_finite_or_zero(maximum[start:stop])[:, None], rows, out=buffer)
            torch.sum(buffer.mul_(class_weight), 1, out=shortfall[start:stop])
    return ShardStatistics(
        maximum,
        # the largest softmax value is exp(0) / sum_exp; a row of nothing but -inf has none, and sums up to 0
        torch.where(maximum == -math.inf, 0.0, peak.reciprocal()),
        None if target_index is None else at_index(logits, dim, target_index),
        shortfall,
        None if class_weight is None else class_weight.sum(),
    )


def merge_statistics(
    local: ShardStatistics, group: Group | None, strategy: Literal["gather", "reduce"] | None = None
) -> MergedStatistics:
    """Merge the ranks' statistics, sending 4 bytes (fp64: 8) for each of their vectors and token.

    ``"gather"`` runs one all-gather and merges in rank order, as online softmax does. ``"reduce"`` runs an
    all-reduce of the maxima, then one of everything else, rescaled and packed; it sends less in large groups.
    Default: by size.
    """
    if group is None or group.size == 1:
        return _merge_gathered(local, _pack(local)[None])
    if strategy is None:
        strategy = "gather" if group.size <= _LARGEST_GATHER else "reduce"
    if strategy == "gather":
        return _merge_gathered(local, all_gather(_pack(local), group))
    return _merge_reduced(local, group)


def _pack(local: ShardStatistics) -> torch.Tensor:
    """One vector of all there is to send."""
    parts = [*_vectors(local), local.weight_sum]
    return torch.cat([part.reshape(-1) for part in parts if part is not None])


def _vectors(local: ShardStatistics) -> list[torch.Tensor]:
    """The statistics that are there."""
    vectors = (local.maximum, local.sum_exp, local.target_logit, local.shortfall)
    return [vector for vector in vectors if vector is not None]


def _merge_gathered(local: ShardStatistics, packed: torch.Tensor) -> MergedStatistics:
    """Merge what :func:`_pack` gave on each rank, ``[P, ...]``."""
    count, tokens = len(_vectors(local)), local.maximum.numel()
    columns = iter(packed[:, : count * tokens].reshape(len(packed), count, tokens).unbind(1))
    maxima, sums = next(columns), next(columns)
    maximum = maxima.amax(0)
    sum_exp = (sums * torch.exp(maxima - maximum)).sum(0)
    target_gap = None if local.target_logit is None else maximum - next(columns).sum(0)
    if local.shortfall is None:
        return _merged(local, maximum, sum_exp, target_gap, None, None)
    weights = packed[:, -1:]
    shortfall = next(columns) + weights * (maximum - _finite_or_zero(maxima))
    return _merged(local, maximum, sum_exp, target_gap, shortfall.sum(0), weights.sum())


def _merge_reduced(local: ShardStatistics, group: Group) -> MergedStatistics:
    """Find the maximum first; then everything can be brought relative to it and summed."""
    maximum = all_reduce(local.maximum, "max", group)
    terms = [local.sum_exp * torch.exp(local.maximum - maximum)]
    if local.target_logit is not None:
        terms.append(local.target_logit)
    if local.shortfall is not None and local.weight_sum is not None:
        terms += [
            local.shortfall + local.weight_sum * (maximum - _finite_or_zero(local.maximum)),
            local.weight_sum.reshape(1),
        ]
    packed = all_reduce(torch.cat(terms), "sum", group)
    sums = iter(packed.split([term.numel() for term in terms]))
    sum_exp = next(sums)
    target_gap = None if local.target_logit is None else maximum - next(sums)
    if local.shortfall is None:
        return _merged(local, maximum, sum_exp, target_gap, None, None)
    return _merged(local, maximum, sum_exp, target_gap, next(sums), next(sums)[0])


def _merged(
    local: ShardStatistics,
    maximum: torch.Tensor,
    sum_exp: torch.Tensor,
    target_gap: torch.Tensor | None,
    shortfall: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
) -> MergedStatistics:
    share = local.sum_exp * torch.exp(local.maximum - maximum) / sum_exp
    return MergedStatistics(maximum, sum_exp.log(), share, target_gap, shortfall, weight_sum)


def _finite_or_zero(maximum: torch.Tensor) -> torch.Tensor:
    """The maximum, or 0 where there is no class or nothing but -inf: a point that can be subtracted from."""
    return torch.where(maximum == -math.inf, 0.0, maximum)
