"""Class-sharded log-softmax and cross-entropy in MindSpore, as ``loss_parallel/kernel_spec.py`` describes them.

The formulas stand here and in ``_loss_exchange``, once; a route does the arithmetic: ``_loss_host`` in NumPy on CPU,
``_loss_device`` in MindSpore operators elsewhere. PyNative mode only, as every ``_Function``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore
from mindspore import Tensor

from hyper_parallel.loss_parallel.kernel_spec import ClassShard, LossKernels, LossOptions
from hyper_parallel.platform.mindspore import _loss_facts as loss_facts
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore._host import on_cpu
from hyper_parallel.platform.mindspore._loss_device import DeviceRoute
from hyper_parallel.platform.mindspore._loss_exchange import ShardStatistics, merge_statistics
from hyper_parallel.platform.mindspore._loss_functions import CrossEntropy, LogSoftmax, NllLoss
from hyper_parallel.platform.mindspore._loss_host import HostRoute
from hyper_parallel.platform.mindspore._loss_targets import IGNORED, masked, place_targets, target_owner

__all__ = ["LossState", "MindSporeLossKernels", "NllState"]

Vector = Any
"""One number a token: a NumPy array or a tensor, as the route has it."""


@dataclass(frozen=True)
class LossState:
    """What the backward of cross-entropy needs besides the logits: at most 16 bytes a token (fp64: 28).

    Attributes:
        slope: per token, A of kernel_spec times ``exp(m - lse)``, m being the maximum of this rank's logits.
        target_index: per token (int32), the local index of its target's class, or ELSEWHERE or IGNORED.
        nll: per token, ``lse - x_y``.
        lse: per token; only with z-loss.
        weight: the caller's weights of all classes, or None.
        smoothing: ``e/V sum_c w_c``, one number; None without smoothing.
    """

    slope: Vector
    target_index: Vector
    nll: Vector
    lse: Vector | None
    weight: Vector | None
    smoothing: Vector | None
    shard: ClassShard
    options: LossOptions


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


class MindSporeLossKernels(LossKernels):
    """The kernels, under autograd, on CPU and accelerators.

    Args:
        route: the arithmetic to use; by default that of the device.
    """

    def __init__(self, route: HostRoute | DeviceRoute | None = None) -> None:
        self.route: Any = route or (HostRoute() if on_cpu() else DeviceRoute())

    def log_softmax(
        self,
        local_logits: Tensor,
        dim: int,
        shard: ClassShard,
        *,
        dtype: Any = None,
        validate: bool | None = None,
    ) -> Tensor:
        options = LossOptions(validate=validate)
        self._ensure_valid("log_softmax", local_logits, dim, None, shard, None, options)
        if dtype == mindspore.float64:  # cast first, so that the statistics have that precision as well
            local_logits = local_logits.astype(dtype)
        return LogSoftmax.apply(local_logits, self, dim, shard, dtype)

    def cross_entropy(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        self._ensure_valid("cross_entropy", local_logits, dim, target, shard, weight, options)
        loss, token_weight = CrossEntropy.apply(local_logits, self, dim, target, shard, weight, options)
        return loss, token_weight

    def nll_loss(
        self,
        local_log_probs: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        self._ensure_valid("nll_loss", local_log_probs, dim, target, shard, weight, options)
        loss, token_weight = NllLoss.apply(local_log_probs, self, dim, target, shard, weight, options)
        return loss, token_weight

    # -- without autograd --------------------------------------------------------------------------------------

    def distributed_log_softmax(
        self, local_logits: Tensor, dim: int, shard: ClassShard, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        route = self.route
        with route.quietly():
            x = route.enter(local_logits)
            maximum, sum_exp, _ = route.row_statistics(x, dim, None, None)
            total = merge_statistics(route, ShardStatistics(maximum, sum_exp), shard.group)
            log_probs = route.log_probs(x, dim, total.reference, total.log_sum_exp, dtype)
            return route.leave(log_probs), route.leave(total.share)

    def distributed_nll_loss_forward(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor, LossState]:
        route = self.route
        with route.quietly():
            x = route.enter(local_logits)
            dtype = route.statistics_dtype(x)
            labels = route.integers(target)
            smoothing = options.label_smoothing
            weights = None if weight is None else route.cast(route.enter(weight), dtype)
            index, token_weight = place_targets(route, labels, shard, weights, options.ignore_index, dtype)
            kept = index != IGNORED
            class_weight = None
            if smoothing:
                ones = route.full(shard.stop - shard.start, 1.0, dtype)
                class_weight = ones if weights is None else weights[shard.start : shard.stop]
            maximum, sum_exp, shortfall = route.row_statistics(x, dim, kept, class_weight)
            local = ShardStatistics(
                maximum,
                sum_exp,
                route.at_index(x, dim, index),
                shortfall,
                None if class_weight is None else class_weight.sum(),
            )
            owner = target_owner(labels, shard) if route.on_host else None
            total = merge_statistics(route, local, shard.group, owner=owner)
            assert total.target_gap is not None

            nll = total.target_gap + total.log_sum_exp
            keep, factor, z = (
                route.number(value, dtype)
                for value in (1.0 - smoothing, smoothing / max(shard.num_classes, 1), options.z_loss)
            )
            slope = keep * token_weight
            loss = slope * nll
            uniform = lse = None
            if total.shortfall is not None and total.weight_sum is not None:
                uniform = route.cast(factor * total.weight_sum, dtype)
                loss = loss + uniform * total.log_sum_exp + factor * total.shortfall
                slope = slope + uniform
            if options.z_loss:
                lse = total.reference + total.log_sum_exp
                loss = loss + z * lse * lse
                slope = slope + 2.0 * z * lse
            # 0 on a rank without classes, whose maximum is -inf
            scale = route.exp((maximum - total.reference) - total.log_sum_exp)
            outside = kept & ((labels < 0) | (labels >= shard.num_classes))
            loss = masked(route, loss, kept, outside, dtype)  # unvalidated: let it be seen
            slope = masked(route, slope * scale, kept, outside, dtype)
            kept_weight = None if weight is None else route.enter(weight)
            state = LossState(slope, index, nll, lse, kept_weight, uniform, shard, options)
            return (
                route.leave(loss.reshape(target.shape)),
                route.leave(token_weight.reshape(target.shape)),
                state,
            )

    def fused_nll_log_softmax_backward(
        self, grad_loss: Tensor, local_logits: Tensor, dim: int, state: LossState
    ) -> Tensor:
        route = self.route
        with route.quietly():
            x = route.enter(local_logits)
            dtype = state.slope.dtype
            upstream = route.cast(route.enter(grad_loss).reshape(-1), dtype)
            upstream = masked(route, upstream, state.target_index != IGNORED, None, dtype)
            shift = None
            if state.smoothing is not None:
                factor = state.options.label_smoothing / max(state.shard.num_classes, 1)
                shift = upstream * route.number(factor, dtype)
            weight = None
            if state.weight is not None:
                weight = route.cast(state.weight[state.shard.start : state.shard.stop], dtype)
            grad = route.gradient(x, dim, upstream * state.slope, shift, weight, state.options.inplace)
            at_target = upstream * _target_slope(route, state, weight)
            grad = route.put_at_index(grad, dim, state.target_index, at_target)
            return local_logits if grad is x else route.leave(grad)

    def nll_loss_forward(
        self,
        local_log_probs: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor, NllState]:
        """Loss and weight of each token from log-probabilities. Collectives: one all-reduce of 4 bytes a token."""
        route = self.route
        with route.quietly():
            x = route.enter(local_log_probs)
            dtype = route.statistics_dtype(x)
            labels = route.integers(target)
            weights = None if weight is None else route.cast(route.enter(weight), dtype)
            index, token_weight = place_targets(route, labels, shard, weights, options.ignore_index, dtype)
            found = route.leave(route.at_index(x, dim, index))
            if shard.group is not None:
                found = collectives.all_reduce(found, "sum", shard.group)
            kept = index != IGNORED
            outside = kept & ((labels < 0) | (labels >= shard.num_classes))
            loss = masked(route, -token_weight * route.enter(found), kept, outside, dtype)
            state = NllState(index, token_weight, tuple(local_log_probs.shape), dim, x[:0])
            return (
                route.leave(loss.reshape(target.shape)),
                route.leave(token_weight.reshape(target.shape)),
                state,
            )

    def nll_loss_backward(self, grad_loss: Tensor, state: NllState) -> Tensor:
        """The gradient of the log-probabilities. Collectives: none."""
        route = self.route
        with route.quietly():
            upstream = route.cast(route.enter(grad_loss).reshape(-1), state.token_weight.dtype)
            zeros = route.zeros(state.shape, state.like)
            at_target = -state.token_weight * upstream
            return route.leave(route.put_at_index(zeros, state.dim, state.target_index, at_target))

    def log_softmax_backward(
        self, grad: Tensor, local_logits: Tensor, dim: int, shard: ClassShard, share: Tensor
    ) -> Tensor:
        """K1's backward: ``g_c - p_c sum_c' g_c'``. Collectives: one all-reduce of 4 bytes a token."""
        route = self.route
        with route.quietly():
            x, g, own = route.enter(local_logits), route.enter(grad), route.enter(share)
            total = route.leave(route.cast(route.row_totals(g, dim), own.dtype))
            if shard.group is not None:
                total = collectives.all_reduce(total, "sum", shard.group)
            return route.leave(route.log_softmax_gradient(x, dim, g, route.enter(total) * own))

    # -- agreement -----------------------------------------------------------------------------------------------

    def validates_by_default(self, local_logits: Tensor) -> bool:
        return bool(local_logits.device == "CPU")

    _describe = staticmethod(loss_facts.describe)  # type: ignore[assignment]
    _read_values = staticmethod(loss_facts.read_values)  # type: ignore[assignment]
    _exchange_headers = staticmethod(loss_facts.exchange_headers)  # type: ignore[assignment]


def _target_slope(route: Any, state: LossState, weight: Vector | None) -> Vector:
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
    if state.lse is not None:
        slope = slope + 2.0 * route.number(options.z_loss, dtype) * state.lse * route.exp(-state.nll)
    return slope
