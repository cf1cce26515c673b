"""The class-sharded loss in NumPy float64, over a list of shards: the oracle of the tests, readable and slow.

A shard is a rank's array; ``axis`` is its class dim and may have any size, zero too. Nothing here is shared
with the kernels. Formulas: see :mod:`hyper_parallel.platform.loss_kernels`; z-loss is that of PaLM (arXiv
2204.02311), label smoothing and class weights are those of ``torch.nn.functional.cross_entropy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "TokenLoss",
    "cross_entropy",
    "cut",
    "entropy",
    "entropy_grad",
    "log_softmax",
    "lse",
    "nll_loss",
    "reduce_tokens",
    "z_loss",
]

Array = NDArray[Any]


@dataclass(frozen=True)
class TokenLoss:
    """Loss and weight ``w_y`` of each token, in the target's shape, and the gradient of the summed loss.

    Attributes:
        loss: 0 where ignored.
        token_weight: 0 where ignored.
        kept: False where ignored.
        grads: for each shard, ``d (sum of loss) / d shard``. Tokens do not mix, so the gradient of ``sum_i
            g_i loss_i`` is ``g_i`` times a token's row: see :meth:`backward`.
        axis: the class dim.
    """

    loss: Array
    token_weight: Array
    kept: Array
    grads: list[Array]
    axis: int

    def backward(self, grad_loss: ArrayLike = 1.0) -> list[Array]:
        """Gradients of the shards for an upstream gradient per token; of ignored tokens exactly 0."""
        upstream = np.where(self.kept, np.asarray(grad_loss, np.float64), 0.0)
        return [grad * np.expand_dims(upstream, self.axis) for grad in self.grads]


def cut(full: ArrayLike, parts: int, axis: int) -> list[Array]:
    """Shards of ``full`` in ``torch.chunk`` sizes: ceil-sized, the trailing ones shorter or empty."""
    array = np.asarray(full)
    size = -(-array.shape[axis] // parts)
    return np.split(array, [min(size * r, array.shape[axis]) for r in range(1, parts)], axis)


def lse(shards: Sequence[ArrayLike], axis: int) -> Array:
    """``log sum_c exp x_c`` over the classes of all shards."""
    arrays = _float64(shards)
    top = np.stack([x.max(axis, initial=-np.inf) for x in arrays]).max(0)
    anchor = np.where(np.isfinite(top), top, 0.0)  # -inf everywhere, or +inf: exp and log say the rest
    with np.errstate(divide="ignore", over="ignore"):
        total = sum(np.exp(x - np.expand_dims(anchor, axis)).sum(axis) for x in arrays)
        return np.asarray(anchor + np.log(total))


def log_softmax(shards: Sequence[ArrayLike], axis: int) -> list[Array]:
    """``x_c - lse``, a shard for a shard."""
    total = np.expand_dims(lse(shards, axis), axis)
    with np.errstate(invalid="ignore"):
        return [x - total for x in _float64(shards)]


def log_softmax_grad(shards: Sequence[ArrayLike], axis: int, upstream: Sequence[ArrayLike]) -> list[Array]:
    """``g_c - p_c sum_c' g_c'`` for upstream gradients of the log-probabilities."""
    gradients = _float64(upstream)
    total = np.expand_dims(sum(g.sum(axis) for g in gradients), axis)
    return [g - np.exp(lp) * total for g, lp in zip(gradients, log_softmax(shards, axis))]


def entropy(shards: Sequence[ArrayLike], axis: int) -> Array:
    """``-sum_c p_c log p_c``, a class of probability 0 adding 0."""
    with np.errstate(invalid="ignore"):  # exp(-inf) * -inf
        terms = [np.where(lp == -np.inf, 0.0, np.exp(lp) * lp).sum(axis) for lp in log_softmax(shards, axis)]
    return np.asarray(-sum(terms))


def entropy_grad(shards: Sequence[ArrayLike], axis: int, upstream: ArrayLike = 1.0) -> list[Array]:
    """``-g p_c (log p_c + H)``, a class of probability 0 having the gradient 0; g one number a token."""
    own = np.expand_dims(entropy(shards, axis), axis)
    factor = np.expand_dims(np.broadcast_to(np.asarray(upstream, np.float64), own.squeeze(axis).shape), axis)
    with np.errstate(invalid="ignore"):
        return [
            np.where(lp == -np.inf, 0.0, -factor * np.exp(lp) * (lp + own)) for lp in log_softmax(shards, axis)
        ]


def z_loss(shards: Sequence[ArrayLike], axis: int, factor: float) -> Array:
    """``factor * lse^2`` of each token."""
    return factor * lse(shards, axis) ** 2


def nll_loss(
    log_probs: Sequence[ArrayLike],
    axis: int,
    target: ArrayLike,
    *,
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
) -> TokenLoss:
    """``-w_y lp_y`` of each token."""
    arrays = _float64(log_probs)
    kept, _, token_weight, hits = _tokens(arrays, axis, target, weight, ignore_index)
    loss = np.where(kept, token_weight * _at_target(arrays, hits, axis), 0.0)
    grads = [np.where(hit, -np.expand_dims(token_weight, axis), 0.0) for hit in hits]
    return TokenLoss(loss, token_weight, kept, grads, axis)


def cross_entropy(
    shards: Sequence[ArrayLike],
    axis: int,
    target: ArrayLike,
    *,
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenLoss:
    """Loss, token weight and gradients with every option.

    Raises:
        IndexError: a target that is neither a class nor ``ignore_index``.
    """
    arrays = _float64(shards)
    kept, weights, token_weight, hits = _tokens(arrays, axis, target, weight, ignore_index)
    num_classes = sum(x.shape[axis] for x in arrays)
    keep, smooth = 1.0 - label_smoothing, label_smoothing / max(num_classes, 1)
    log_probs = log_softmax(arrays, axis)
    total = lse(arrays, axis)

    loss = keep * token_weight * _at_target(log_probs, hits, axis)
    slope = keep * token_weight  # A: the factor of p_c
    if label_smoothing:
        loss = loss + smooth * sum((-w * lp).sum(axis) for w, lp in zip(weights, log_probs))
        slope = slope + smooth * sum(w.sum() for w in weights)
    if z_loss:
        loss = loss + z_loss * total**2
        slope = slope + 2 * z_loss * total
    grads = []
    for hit, lp, w in zip(hits, log_probs, weights):
        grad = (
            np.expand_dims(slope, axis) * np.exp(lp)
            - keep * np.expand_dims(token_weight, axis) * hit
            - smooth * w
        )
        grads.append(np.where(np.expand_dims(kept, axis), grad, 0.0))
    return TokenLoss(np.where(kept, loss, 0.0), token_weight, kept, grads, axis)


def reduce_tokens(parts: Sequence[TokenLoss], reduction: str) -> tuple[Any, list[list[Array]]]:
    """Reduce a loss whose tokens are cut over several ranks, one part each; and the gradient of every shard.

    ``"none"``: the parts' losses, with the gradient of their sum. ``"sum"``: over all tokens. ``"mean"``:
    divided by the token weights of all parts, NaN where they add up to 0 (with gradients of exactly 0), as
    PyTorch has it.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"unknown reduction {reduction!r}; expected 'none', 'sum' or 'mean'")
    if reduction == "none":
        return [part.loss for part in parts], [part.backward() for part in parts]
    total = np.float64(sum(part.loss.sum() for part in parts))
    scale = np.float64(1.0)
    if reduction == "mean":
        with np.errstate(divide="ignore"):
            scale = 1.0 / np.float64(sum(part.token_weight.sum() for part in parts))
    with np.errstate(invalid="ignore"):
        return total * scale, [part.backward(scale) for part in parts]


def _tokens(
    arrays: Sequence[Array], axis: int, target: ArrayLike, weight: ArrayLike | None, ignore_index: int
) -> tuple[Array, list[Array], Array, list[Array]]:
    """Which tokens count; each shard's class weights, broadcastable; ``w_y``; each shard's ``c == y``."""
    labels = np.asarray(target).astype(np.int64)
    num_classes = sum(x.shape[axis] for x in arrays)
    kept = labels != ignore_index
    bad = kept & ((labels < 0) | (labels >= num_classes))
    if bad.any():
        raise IndexError(f"Target {labels[bad].flat[0]} is out of bounds for {num_classes} classes")
    all_weights = np.ones(num_classes) if weight is None else np.asarray(weight, np.float64)
    token_weight = np.zeros(labels.shape)
    token_weight[kept] = all_weights[labels[kept]]
    weights, hits, start = [], [], 0
    for x in arrays:
        stop = start + x.shape[axis]
        shape = [1] * x.ndim
        shape[axis] = stop - start
        weights.append(all_weights[start:stop].reshape(shape))
        hits.append(np.arange(start, stop).reshape(shape) == np.expand_dims(labels, axis))
        hits[-1] &= np.expand_dims(kept, axis)
        start = stop
    return kept, weights, token_weight, hits


def _at_target(log_probs: Sequence[Array], hits: Sequence[Array], axis: int) -> Array:
    """``-lp_y`` of each token, from the one shard that holds its class."""
    return np.asarray(sum(np.where(hit, -lp, 0.0).sum(axis) for hit, lp in zip(hits, log_probs)))


def _float64(shards: Sequence[ArrayLike]) -> list[Array]:
    return [np.asarray(x, np.float64) for x in shards]
