"""Class-sharded log-softmax and cross-entropy in MindSpore, as ``platform/loss_kernels.py`` describes them.

The formulas stand here and in ``_loss_exchange``, once; a route does the arithmetic: ``_loss_host`` in NumPy on CPU,
``_loss_device`` in MindSpore operators elsewhere. PyNative mode only, as every ``_Function``.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor

from hyper_parallel.platform.loss_kernels import ClassShard, LossKernels, LossOptions, TokenOutputs
from hyper_parallel.platform.loss_statistics import IGNORED
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore._entropy_term import EntropyTerm
from hyper_parallel.platform.mindspore._host import on_cpu
from hyper_parallel.platform.mindspore._loss_device import DeviceArithmetic
from hyper_parallel.platform.mindspore._loss_exchange import ShardStatistics, merge_statistics
from hyper_parallel.platform.mindspore._loss_facts import MindSporeFactReader, exchange_headers
from hyper_parallel.platform.mindspore._loss_host import HostArithmetic
from hyper_parallel.platform.mindspore._loss_nodes import CrossEntropy, LogSoftmax, NllLoss
from hyper_parallel.platform.mindspore._loss_overlap import exchanged_statistics
from hyper_parallel.platform.mindspore._loss_state import LossState, NllState, of_kept, target_slope
from hyper_parallel.platform.mindspore._loss_targets import masked, place_targets, target_owner

__all__ = ["MindSporeLossKernels"]

class MindSporeLossKernels(LossKernels):
    """The kernels, under autograd, on CPU and accelerators.

    Args:
        route: the arithmetic to use; by default that of the device.
    """

    def __init__(self, route: HostArithmetic | DeviceArithmetic | None = None) -> None:
        self.route: Any = route or (HostArithmetic() if on_cpu() else DeviceArithmetic())

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

    def token_outputs(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> TokenOutputs:
        self._ensure_valid("cross_entropy", local_logits, dim, target, shard, weight, options)
        found = CrossEntropy.apply(local_logits, self, dim, target, shard, weight, options)
        loss, token_weight, log_prob, entropy = found
        # times 1: a custom node that takes a later output of another one as it is cannot be differentiated
        return TokenOutputs(
            loss, token_weight, log_prob * 1 if options.log_probs else None, entropy * 1 if options.entropy else None
        )

    def more_outputs(self, state: LossState, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """``log p_y`` and the entropy of each token; a zero where not asked for."""
        route, nll = self.route, state.nll
        log_prob = entropy = route.full(1, 0.0, nll.dtype)
        if state.options.log_probs:
            log_prob = masked(route, -nll, state.target_index != IGNORED, None, nll.dtype).reshape(shape)
        if state.entropy is not None:
            entropy = state.entropy.reshape(shape)
        return route.leave(log_prob), route.leave(route.copy(entropy))

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
            maximum, sum_exp, _, _ = route.row_statistics(x, dim, None, None)
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
            total, maximum = exchanged_statistics(
                route,
                x,
                dim,
                shard.group,
                options.overlap_blocks,
                owner=target_owner(labels, shard) if route.on_host else None,
                target_index=index,
                needed=kept,
                class_weight=class_weight,
                entropy=options.entropy,
            )
            assert total.target_gap is not None

            nll = total.target_gap + total.log_sum_exp
            keep, factor, z = (
                route.number(value, dtype)
                for value in (1.0 - smoothing, smoothing / max(shard.num_classes, 1), options.z_loss)
            )
            slope = keep * token_weight
            loss = slope * nll
            uniform = None
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
            nll = route.cast(route.where(outside, math.nan, nll), dtype)
            kept_weight = None if weight is None else route.enter(weight)
            wanted = options.log_probs or options.entropy
            more: list[Any] = [masked(route, scale, kept, None, dtype) if wanted else None]
            if total.mean is not None:
                entropy = masked(route, total.log_sum_exp - total.mean, kept, None, dtype)
                more += [entropy, total.reference, total.log_sum_exp]
            anchor = route.where(maximum == -math.inf, route.number(0.0, dtype), maximum)
            state = LossState(slope, index, nll, anchor, kept_weight, uniform, shard, options, *more)
            return (
                route.leave(loss.reshape(target.shape)),
                route.leave(token_weight.reshape(target.shape)),
                state,
            )

    def fused_nll_log_softmax_backward(
        self,
        grad_loss: Tensor,
        local_logits: Tensor,
        dim: int,
        state: LossState,
        grad_log_prob: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> Tensor:
        route = self.route
        with route.quietly():
            x = route.enter(local_logits)
            dtype = state.slope.dtype
            upstream = of_kept(route, grad_loss, state)
            shift = None
            if state.smoothing is not None:
                factor = state.options.label_smoothing / max(state.shard.num_classes, 1)
                shift = upstream * route.number(factor, dtype)
            weight = None
            if state.weight is not None:
                weight = route.cast(state.weight[state.shard.start : state.shard.stop], dtype)
            factor, at_target = upstream * state.slope, upstream * target_slope(route, state, weight, x, dim)
            if grad_log_prob is not None:
                given = of_kept(route, grad_log_prob, state)
                factor = factor - given * state.scale
                at_target = at_target - given * route.expm1(-state.nll)
            entropy = None
            if grad_entropy is not None:
                given = of_kept(route, grad_entropy, state)
                entropy = EntropyTerm(-given * state.scale, state.reference, state.log_sum_exp)
                factor = factor + entropy.factor * state.entropy
                at_target = at_target + given * route.exp(-state.nll) * (state.nll - state.entropy)
            grad = route.gradient(x, dim, factor, state.anchor, shift, weight, state.options.inplace, entropy)
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

    _facts = MindSporeFactReader()
    _exchange_headers = staticmethod(exchange_headers)  # type: ignore[assignment]
