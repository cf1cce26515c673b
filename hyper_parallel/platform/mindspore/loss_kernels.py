"""Class-sharded log-softmax and cross-entropy in MindSpore, as ``loss_parallel/kernel_spec.py`` describes them.

The formulas stand here and in ``_loss_exchange``, once; a route does the arithmetic: ``_loss_host`` in NumPy on CPU,
``_loss_device`` in MindSpore operators elsewhere. PyNative mode only, as every ``_Function``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from hyper_parallel.loss_parallel.kernel_spec import ClassShard, LossKernels, LossOptions
from hyper_parallel.platform.mindspore import _loss_facts as loss_facts
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore._loss_device import DeviceRoute
from hyper_parallel.platform.mindspore._loss_exchange import ShardStatistics, merge_statistics
from hyper_parallel.platform.mindspore._loss_host import HostRoute
from hyper_parallel.platform.mindspore.custom_grad import requires_grad

__all__ = ["ELSEWHERE", "IGNORED", "LossState", "MindSporeLossKernels"]

ELSEWHERE = -1
"""Target index of a token whose target's class another rank holds."""

IGNORED = -2
"""Target index of a token whose target is ``ignore_index``."""

Vector = Any


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


class MindSporeLossKernels(LossKernels):
    """The kernels, under autograd, on CPU and accelerators.

    Args:
        route: the arithmetic to use; by default that of the device.
    """

    def __init__(self, route: HostRoute | DeviceRoute | None = None) -> None:
        on_cpu = mindspore.get_context("device_target") == "CPU"
        self.route: Any = route or (HostRoute() if on_cpu else DeviceRoute())

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
        return _LogSoftmax.apply(local_logits, self, dim, shard, dtype)

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
        loss, token_weight = _CrossEntropy.apply(local_logits, self, dim, target, shard, weight, options)
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
        loss, token_weight = _NllLoss.apply(local_log_probs, self, dim, target, shard, weight, options)
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
            index, token_weight = self._place_targets(labels, shard, weights, options.ignore_index, dtype)
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
            owner = _owner(labels, shard) if route.on_host else None
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
            loss = self._masked(loss, kept, outside, dtype)  # unvalidated: let it be seen
            slope = self._masked(slope * scale, kept, outside, dtype)
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
            upstream = self._masked(upstream, state.target_index != IGNORED, None, dtype)
            shift = None
            if state.smoothing is not None:
                factor = state.options.label_smoothing / max(state.shard.num_classes, 1)
                shift = upstream * route.number(factor, dtype)
            weight = None
            if state.weight is not None:
                weight = route.cast(state.weight[state.shard.start : state.shard.stop], dtype)
            grad = route.gradient(x, dim, upstream * state.slope, shift, weight, state.options.inplace)
            at_target = upstream * self._target_slope(state, weight)
            grad = route.put_at_index(grad, dim, state.target_index, at_target)
            return local_logits if grad is x else route.leave(grad)

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

    # -- per token -------------------------------------------------------------------------------------------------

    def _place_targets(
        self, labels: Vector, shard: ClassShard, weights: Vector | None, ignore_index: int, dtype: Any
    ) -> tuple[Vector, Vector]:
        """Where each target's class is among the local ones (int32), and ``w_y``, 0 where ignored."""
        route = self.route
        ignored = labels == ignore_index
        here = (labels >= shard.start) & (labels < shard.stop)
        index = route.where(here, labels - shard.start, ELSEWHERE)
        index = route.cast(route.where(ignored, IGNORED, index), np.int32 if route.on_host else mindspore.int32)
        if weights is None:
            return index, route.cast(labels != ignore_index, dtype)
        picked = route.take(weights, route.clip(labels, 0, max(shard.num_classes - 1, 0)))
        return index, route.cast(route.where(ignored, 0.0, picked), dtype)

    def _masked(self, x: Vector, kept: Vector, outside: Vector | None, dtype: Any) -> Vector:
        """``x`` where kept, else 0; NaN outside."""
        route = self.route
        x = route.where(kept, x, 0.0)
        if outside is not None:
            x = route.where(outside, math.nan, x)
        return route.cast(x, dtype)

    def _target_slope(self, state: LossState, weight: Vector | None) -> Vector:
        """Per token, where the target's class is here, ``A p_y - B - e/V w_y``.

        Computed as ``B (p_y - 1) + (A - B) p_y - e/V w_y``: ``p_y - 1`` comes from nll without cancelling where p_y is
        close to 1.
        """
        route, options = self.route, state.options
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


class _CrossEntropy(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_logits: Tensor,
        kernels: MindSporeLossKernels,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        loss, token_weight, state = kernels.distributed_nll_loss_forward(
            local_logits, dim, target, shard, weight, options
        )
        ctx.save_for_backward(local_logits)
        ctx.kernels, ctx.dim, ctx.state, ctx.spent = kernels, dim, state, False
        ctx.mark_non_differentiable(token_weight)
        return loss, token_weight

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy(inplace=True) has overwritten the logits with their gradient; backward can run once"
            )
        ctx.spent = ctx.state.options.inplace
        (local_logits,) = ctx.saved_tensors
        grad = ctx.kernels.fused_nll_log_softmax_backward(grad_loss, local_logits, ctx.dim, ctx.state)
        return _differentiable_once("cross_entropy", grad, grad_loss, local_logits), *[None] * 6


class _LogSoftmax(_Function):
    @staticmethod
    def forward(
        ctx: Any, local_logits: Tensor, kernels: MindSporeLossKernels, dim: int, shard: ClassShard, dtype: Any
    ) -> Tensor:
        log_probs, share = kernels.distributed_log_softmax(local_logits, dim, shard, dtype)
        ctx.save_for_backward(local_logits, share)
        ctx.kernels, ctx.dim, ctx.shard = kernels, dim, shard
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        local_logits, share = ctx.saved_tensors
        out = ctx.kernels.log_softmax_backward(grad, local_logits, ctx.dim, ctx.shard, share)
        return _differentiable_once("log_softmax", out, grad, local_logits), *[None] * 4


class _NllLoss(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_log_probs: Tensor,
        kernels: MindSporeLossKernels,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        route = kernels.route
        with route.quietly():
            x = route.enter(local_log_probs)
            dtype = route.statistics_dtype(x)
            labels = route.integers(target)
            weights = None if weight is None else route.cast(route.enter(weight), dtype)
            index, token_weight = kernels._place_targets(labels, shard, weights, options.ignore_index, dtype)
            found = route.leave(route.at_index(x, dim, index))
            if shard.group is not None:
                found = collectives.all_reduce(found, "sum", shard.group)
            kept = index != IGNORED
            outside = kept & ((labels < 0) | (labels >= shard.num_classes))
            loss = kernels._masked(-token_weight * route.enter(found), kept, outside, dtype)
            ctx.kernels, ctx.dim, ctx.index, ctx.token_weight = kernels, dim, index, token_weight
            ctx.shape, ctx.like = tuple(local_log_probs.shape), x[:0]
            shaped = route.leave(token_weight.reshape(target.shape))
            ctx.mark_non_differentiable(shaped)
            return route.leave(loss.reshape(target.shape)), shaped

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        route = ctx.kernels.route
        with route.quietly():
            upstream = route.cast(route.enter(grad_loss).reshape(-1), ctx.token_weight.dtype)
            zeros = route.zeros(ctx.shape, ctx.like)
            grad = route.leave(route.put_at_index(zeros, ctx.dim, ctx.index, -ctx.token_weight * upstream))
        return _differentiable_once("nll_loss", grad, grad_loss), *[None] * 6


class _Once(_Function):
    @staticmethod
    def forward(ctx: Any, name: str, grad: Tensor, *inputs: Tensor) -> Tensor:
        ctx.name = name
        return grad * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"the class-sharded {ctx.name} cannot be differentiated twice: its gradient has no derivative"
        )


def _differentiable_once(name: str, grad: Tensor, *inputs: Tensor) -> Tensor:
    """``grad``; while the backward itself is recorded, tied to what it depends on: differentiating it raises."""
    if any(requires_grad(x) for x in inputs):
        result: Tensor = _Once.apply(name, grad, *inputs)
        return result
    return grad


def _owner(labels: np.ndarray, shard: ClassShard) -> np.ndarray | None:
    """Per token the member of the class group that holds its class, -1 for none; None where not known."""
    if shard.ranges is None:
        return None
    stops = np.array([stop for _, stop in shard.ranges])
    owner = np.searchsorted(stops, labels, side="right")
    return np.where((labels >= 0) & (labels < shard.num_classes), owner, -1)
