"""Gradients of the class-sharded loss in this rank's logits, without autograd and without collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyper_parallel.loss_parallel.kernel_spec import ClassShard, LossOptions
from hyper_parallel.platform.torch._loss_rows import (
    Chunk,
    chunks,
    softmax_rows,
    statistics_dtype,
    zero_rows,
)
from hyper_parallel.platform.torch._loss_targets import IGNORED, put_at_index

__all__ = ["LossState", "cross_entropy_grad", "log_softmax_grad", "sum_over_classes"]


@dataclass(frozen=True)
class LossState:
    """What the backward of cross-entropy needs besides the logits: at most 16 bytes a token (fp64: 28).

    Attributes:
        slope: per token, A of kernel_spec times this rank's share of the probabilities.
        target_index: per token (int32), the local index of its target's class, or ELSEWHERE or IGNORED.
        nll: per token, ``lse - x_y``.
        lse: per token; only with z-loss.
        weight: the weights of all classes, or None.
        smoothing: ``e/V sum_c w_c``, one number; None without smoothing.
    """

    slope: torch.Tensor
    target_index: torch.Tensor
    nll: torch.Tensor
    lse: torch.Tensor | None
    weight: torch.Tensor | None
    smoothing: torch.Tensor | None
    shard: ClassShard
    options: LossOptions


def cross_entropy_grad(
    grad_loss: torch.Tensor, logits: torch.Tensor, dim: int, state: LossState
) -> torch.Tensor:
    """``g (A p_c - B [c = y] - e/V w_c)``, rounded once to the logits' dtype; of ignored tokens exactly 0."""
    upstream = torch.where(state.target_index == IGNORED, 0.0, grad_loss.reshape(-1).to(state.slope.dtype))
    weight = _local_weight(state)
    factor = state.options.label_smoothing / max(state.shard.num_classes, 1)
    shift = None if state.smoothing is None else upstream * factor
    out = logits if state.options.inplace and _writable(logits) else torch.empty_like(logits)
    scale = _RowScale(upstream * state.slope, logits)
    for chunk in chunks(dim, logits, out):
        rows, grads = chunk.rows
        if shift is None:
            scale.softmax(chunk, rows, out=grads)
            continue
        scale.softmax(chunk, rows, out=chunk.buffer)
        row_shift = shift[chunk.start : chunk.stop, None]
        chunk.buffer.sub_(row_shift if weight is None else row_shift * weight)
        grads.copy_(chunk.buffer)
    put_at_index(out, dim, state.target_index, upstream * _target_slope(state, weight))
    return out


def log_softmax_grad(
    grad: torch.Tensor, grad_sum: torch.Tensor, logits: torch.Tensor, dim: int, share: torch.Tensor
) -> torch.Tensor:
    """``g_c - p_c grad_sum``, where ``grad_sum`` is the sum of g over the classes of all ranks."""
    out = torch.empty_like(logits)
    scale = _RowScale(grad_sum * share, logits)
    for chunk in chunks(dim, logits, grad, out):
        rows, upstream, grads = chunk.rows
        scale.softmax(chunk, rows, out=chunk.buffer)
        grads.copy_(torch.sub(upstream, chunk.buffer, out=chunk.buffer))
    return out


def sum_over_classes(x: torch.Tensor, dim: int, tokens: int) -> torch.Tensor:
    """Per token the sum over this rank's classes, in the statistics' dtype, without a copy of ``x`` in it."""
    out = torch.zeros(tokens, dtype=statistics_dtype(x), device=x.device)
    for start, stop, (rows,), _ in chunks(dim, x):
        torch.sum(rows, 1, dtype=out.dtype, out=out[start:stop])
    return out


class _RowScale:
    """Multiplies the local softmax by a factor a row; where that is 0 the row is 0, whatever its logits are.

    Such rows are those of ignored tokens, and those whose local logits are all -inf, where softmax gives NaN.
    """

    def __init__(self, factor: torch.Tensor, logits: torch.Tensor) -> None:
        self._factor = factor[:, None]
        self._zero = factor == 0
        self._on_cpu = logits.device.type == "cpu"
        self._any_zero = not self._on_cpu or bool(self._zero.any())

    def softmax(self, chunk: Chunk, rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out = softmax(rows) * factor``; the chunk's buffer is overwritten."""
        zero = self._zero[chunk.start : chunk.stop]
        if self._any_zero and self._on_cpu and bool(zero.all()):
            out.zero_()
            return
        softmax_rows(rows, chunk.buffer)
        if out.dtype == chunk.buffer.dtype:
            torch.mul(chunk.buffer, self._factor[chunk.start : chunk.stop], out=out)
        else:
            out.copy_(chunk.buffer.mul_(self._factor[chunk.start : chunk.stop]))
        if self._any_zero:
            zero_rows(out, zero)


def _target_slope(state: LossState, weight: torch.Tensor | None) -> torch.Tensor:
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
    if state.lse is not None:
        slope = slope + 2.0 * state.options.z_loss * state.lse * torch.exp(-state.nll)
    return slope


def _local_weight(state: LossState) -> torch.Tensor | None:
    """The weights of this rank's classes, in the statistics' dtype."""
    if state.weight is None:
        return None
    return state.weight[state.shard.start : state.shard.stop].to(state.slope.dtype)


def _writable(x: torch.Tensor) -> bool:
    """Whether each element has memory of its own, as an expanded tensor's have not."""
    return all(stride != 0 or size == 1 for size, stride in zip(x.shape, x.stride()))
