"""What the backward passes need of each token, and what they compute from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.loss_statistics import IGNORED
from hyper_parallel.platform.mindspore._loss_targets import masked

__all__ = ["LossState", "NllState", "Vector", "of_kept", "target_slope"]

Vector = Any
"""One number a token: a NumPy array or a tensor, as the route has it."""


@dataclass(frozen=True)
class LossState:
    """What the backward of cross-entropy needs besides the logits: 16 bytes a token (fp64: 28).

    Attributes:
        slope: per token, A of ``LossKernels`` times ``exp(m - lse)``, m being the maximum of this rank's logits.
        target_index: per token (int32), the local index of its target's class, or ELSEWHERE or IGNORED.
        nll: per token, ``lse - x_y``.
        anchor: per token m, or 0 where it is -inf.
        weight: the caller's weights of all classes, or None.
        smoothing: ``e/V sum_c w_c``, one number; None without smoothing.
        scale: per token ``exp(m - lse)``; only with log-probabilities or entropy.
        entropy, reference, log_sum_exp: per token the entropy and, in two parts, the log-sum-exp; only with entropy.
    """

    slope: Vector
    target_index: Vector
    nll: Vector
    anchor: Vector
    weight: Vector | None
    smoothing: Vector | None
    shard: ClassShard
    options: LossOptions
    scale: Vector | None = None
    entropy: Vector | None = None
    reference: Vector | None = None
    log_sum_exp: Vector | None = None


@dataclass(frozen=True)
class NllState:
    """What the backward of nll_loss needs.

    Attributes:
        target_index: as in :class:`LossState`.
        token_weight: ``w_y`` of each token.
        shape: of the log-probabilities.
        dim: their class dim.
        like: something of their dtype.
    """

    target_index: Vector
    token_weight: Vector
    shape: tuple[int, ...]
    dim: int
    like: Any


def of_kept(route: Any, grad: Tensor, state: LossState) -> Vector:
    """An upstream gradient per token, 0 where ignored."""
    dtype = state.slope.dtype
    given = route.cast(route.enter(grad).reshape(-1), dtype)
    return masked(route, given, state.target_index != IGNORED, None, dtype)


def target_slope(route: Any, state: LossState, weight: Vector | None, x: Any, dim: int) -> Vector:
    """Per token, where the target's class is here, ``A p_y - B - e/V w_y``.

    Computed as ``B (p_y - 1) + (A - B) p_y - e/V w_y``: ``p_y - 1`` comes from nll without cancelling where p_y is
    close to 1.
    """
    options = state.options
    smoothing, dtype = options.label_smoothing, state.slope.dtype
    target_weight: Any = route.number(1.0, dtype)
    if weight is not None and state.shard.stop > state.shard.start:
        last = state.shard.stop - state.shard.start - 1
        target_weight = route.take(weight, route.clip(state.target_index, 0, last))
    slope = route.number(1.0 - smoothing, dtype) * target_weight * route.expm1(-state.nll)
    if state.smoothing is not None:
        slope = slope + state.smoothing * route.exp(-state.nll)
        slope = slope - route.number(smoothing / max(state.shard.num_classes, 1), dtype) * target_weight
    if options.z_loss:
        lse = state.nll + route.at_index(x, dim, state.target_index)
        p_target = route.exp(-state.nll)  # 0 for a logit of -inf, from which the lse cannot be told
        zero = route.number(0.0, dtype)
        slope = slope + 2.0 * route.number(options.z_loss, dtype) * route.where(p_target == 0, zero, lse * p_target)
    return slope
