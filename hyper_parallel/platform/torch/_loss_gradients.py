"""Gradients of the class-sharded loss in this rank's logits, without autograd and without collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.loss_statistics import IGNORED
from hyper_parallel.platform.torch._huge_pages import empty_like
from hyper_parallel.platform.torch._loss_entropy import EntropyRows
from hyper_parallel.platform.torch._loss_fused import fused_kernels
from hyper_parallel.platform.torch._loss_rows import (
    Chunk,
    chunks,
    exp_rows,
    matrices,
    softmax_rows,
    statistics_dtype,
    zero_rows,
)
from hyper_parallel.platform.torch._loss_targets import at_index, put_at_index

__all__ = ["LossState", "cross_entropy_grad", "log_softmax_grad", "sum_over_classes"]


@dataclass(frozen=True)
class LossState:
    """What the backward of cross-entropy needs besides the logits: 16 bytes a token (fp64: 28).

    Probabilities are ``p_c = unit exp(x_c - anchor)``.

    Attributes:
        slope: per token, A of ``LossKernels`` times the unit.
        target_index: per token (int32), the local index of its target's class, or ELSEWHERE or IGNORED.
        nll: per token, ``lse - x_y``.
        anchor: per token, the largest of this rank's logits (0 for -inf), or 0 where that will do.
        weight: the weights of all classes, or None.
        smoothing: ``e/V sum_c w_c``, one number; None without smoothing.
        unit: per token, ``exp(anchor - lse)``; only with log-probabilities or entropy.
        entropy, reference, log_sum_exp: per token the entropy and, in two parts, the log-sum-exp; only with entropy.
    """

    slope: torch.Tensor
    target_index: torch.Tensor
    nll: torch.Tensor
    anchor: torch.Tensor
    weight: torch.Tensor | None
    smoothing: torch.Tensor | None
    shard: ClassShard
    options: LossOptions
    unit: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    log_sum_exp: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What autograd has to keep, beside the weights."""
        own = (self.slope, self.target_index, self.nll, self.anchor)
        return (*own, self.unit, self.entropy, self.reference, self.log_sum_exp)

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor | None],
        weight: torch.Tensor | None,
        smoothing: torch.Tensor | None,
        shard: ClassShard,
        options: LossOptions,
    ) -> LossState:
        """From what :attr:`tensors` gave."""
        slope, index, nll, anchor, *more = tensors
        assert slope is not None and index is not None and nll is not None and anchor is not None
        return cls(slope, index, nll, anchor, weight, smoothing, shard, options, *more)


def cross_entropy_grad(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    dim: int,
    state: LossState,
    grad_log_prob: torch.Tensor | None = None,
    grad_entropy: torch.Tensor | None = None,
) -> torch.Tensor:
    """``g (A p_c - B [c = y] - e/V w_c)``, rounded once to the logits' dtype; of ignored tokens exactly 0.

    To it come the gradients of ``log p_y`` and of the entropy, where there are any.
    """
    upstream = _of_kept(grad_loss, state)
    weight = _local_weight(state)
    factor = state.options.label_smoothing / max(state.shard.num_classes, 1)
    shift = None if state.smoothing is None else upstream * factor
    out = logits if state.options.inplace and _writable(logits) else empty_like(logits)
    factor_p, at_target = upstream * state.slope, upstream * _target_slope(state, weight, logits, dim)
    if grad_log_prob is not None and state.unit is not None:
        given = _of_kept(grad_log_prob, state)
        factor_p = factor_p - given * state.unit
        at_target = at_target - given * torch.expm1(-state.nll)
    entropy = None
    if grad_entropy is not None:
        entropy = EntropyRows(_of_kept(grad_entropy, state), state)
        factor_p = factor_p + entropy.constant
        at_target = at_target + entropy.at_target
    plain = entropy is None and shift is None and type(factor_p) is torch.Tensor
    fused = fused_kernels(dim, logits, out) if plain else None
    if fused is not None:
        for first, (rows, grads) in matrices(dim, logits, out):
            part = slice(first, first + len(rows))
            fused.row_gradients(rows, state.anchor[part], factor_p[part], grads)
        put_at_index(out, dim, state.target_index, at_target)
        return out
    scale = _RowScale(factor_p, logits, state.anchor)
    for chunk in chunks(dim, logits, out):
        rows, grads = chunk.rows
        if entropy is not None:
            entropy.exp_times_slope(chunk, rows, factor_p)
            if shift is not None:
                row_shift = shift[chunk.start : chunk.stop, None]
                chunk.buffer.sub_(row_shift if weight is None else row_shift * weight)
            grads.copy_(chunk.buffer)
            continue
        if shift is None:
            scale.probabilities(chunk, rows, out=grads)
            continue
        scale.probabilities(chunk, rows, out=chunk.buffer)
        row_shift = shift[chunk.start : chunk.stop, None]
        chunk.buffer.sub_(row_shift if weight is None else row_shift * weight)
        grads.copy_(chunk.buffer)
    put_at_index(out, dim, state.target_index, at_target)
    return out


def log_softmax_grad(
    grad: torch.Tensor, grad_sum: torch.Tensor, logits: torch.Tensor, dim: int, share: torch.Tensor
) -> torch.Tensor:
    """``g_c - p_c grad_sum``, where ``grad_sum`` is the sum of g over the classes of all ranks."""
    out = empty_like(logits)
    scale = _RowScale(grad_sum * share, logits)
    for chunk in chunks(dim, logits, grad, out):
        rows, upstream, grads = chunk.rows
        scale.probabilities(chunk, rows, out=chunk.buffer)
        grads.copy_(torch.sub(upstream, chunk.buffer, out=chunk.buffer))
    return out


def sum_over_classes(x: torch.Tensor, dim: int, tokens: int) -> torch.Tensor:
    """Per token the sum over this rank's classes, in the statistics' dtype, without a copy of ``x`` in it."""
    out = torch.zeros(tokens, dtype=statistics_dtype(x), device=x.device)
    for start, stop, (rows,), _ in chunks(dim, x):
        torch.sum(rows, 1, dtype=out.dtype, out=out[start:stop])
    return out


class _RowScale:
    """Multiplies ``exp(x - anchor)``, or without an anchor the local softmax, by a factor a row.

    Where the factor is 0 the row is 0, whatever its logits are: that of an ignored token, or one of nothing but -inf,
    where softmax gives NaN.
    """

    def __init__(self, factor: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor | None = None) -> None:
        self._anchor = anchor
        self._factor = factor[:, None]
        self._zero = factor == 0
        self._on_cpu = logits.device.type == "cpu"
        self._any_zero = not self._on_cpu or bool(self._zero.any())
        self._moved = None if anchor is None else anchor != 0
        self._any_moved = not self._on_cpu or (self._moved is not None and bool(self._moved.any()))

    def probabilities(self, chunk: Chunk, rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` = the rows' exponentials times the factor; the chunk's buffer is overwritten."""
        zero = self._zero[chunk.start : chunk.stop]
        if self._any_zero and self._on_cpu and bool(zero.all()):
            out.zero_()
            return
        # into the result's own memory where it can hold them: a detour would take room in the cache
        values = out if out.dtype == chunk.buffer.dtype else chunk.buffer
        if self._anchor is None:
            softmax_rows(rows, values)
        else:
            exp_rows(rows, self._anchor_of(chunk), values)
        values.mul_(self._factor[chunk.start : chunk.stop])
        if values is not out:
            out.copy_(values)
        if self._any_zero:
            zero_rows(out, zero)


    def _anchor_of(self, chunk: Chunk) -> torch.Tensor | None:
        """Of the chunk's rows; None where all are 0, which on CPU saves a pass."""
        assert self._anchor is not None and self._moved is not None
        part = slice(chunk.start, chunk.stop)
        if self._on_cpu and not (self._any_moved and bool(self._moved[part].any())):
            return None
        return self._anchor[part]


def _target_slope(
    state: LossState, weight: torch.Tensor | None, logits: torch.Tensor, dim: int
) -> torch.Tensor:
    """Per token, where the target's class is here, ``A p_y - B - e/V w_y``.

    Computed as ``B (p_y - 1) + (A - B) p_y - e/V w_y``: ``p_y - 1`` comes from nll without cancelling where
    p_y is close to 1.
    """
    smoothing = state.options.label_smoothing
    target_weight: torch.Tensor | float = 1.0
    if weight is not None:
        padded = torch.cat([weight, weight.new_zeros(1)])  # negative indices read the last
        target_weight = padded[state.target_index.clamp(min=-1).long()]
    slope = (1.0 - smoothing) * target_weight * torch.expm1(-state.nll)
    if state.smoothing is not None:
        slope = slope + state.smoothing * torch.exp(-state.nll)
        slope = slope - smoothing / max(state.shard.num_classes, 1) * target_weight
    if state.options.z_loss:
        lse = state.nll + at_index(logits, dim, state.target_index)
        p_target = torch.exp(-state.nll)  # 0 for a logit of -inf, from which the lse cannot be told
        slope = slope + 2.0 * state.options.z_loss * torch.where(p_target == 0, 0.0, lse * p_target)
    return slope


def _of_kept(grad: torch.Tensor, state: LossState) -> torch.Tensor:
    """An upstream gradient per token, 0 where ignored."""
    return torch.where(state.target_index == IGNORED, 0.0, grad.reshape(-1).to(state.slope.dtype))


def _local_weight(state: LossState) -> torch.Tensor | None:
    """The weights of this rank's classes, in the statistics' dtype."""
    if state.weight is None:
        return None
    return state.weight[state.shard.start : state.shard.stop].to(state.slope.dtype)


def _writable(x: torch.Tensor) -> bool:
    """Whether each element has memory of its own, as those of an expanded or unfolded tensor have not."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
