"""Attention with grouped queries, and rotary positions: on CPU one operator each, in NumPy.

MindSpore's CPU backend has neither as a fused operator, and of those that they are made of there, those that broadcast,
repeat or move memory take more time than the products of matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.platform.mindspore._host import as_float32, on_cpu, to_host, to_tensor
from hyper_parallel.platform.mindspore.custom_grad import differentiable_once, linear_map

__all__ = ["attention", "rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dims ``i`` and ``i + size / 2`` of each head by the angles of its position.

    Args:
        x: ``[batch, heads, length, size]``.
        cos: ``[rows, 1, length, size]``; ``rows`` is 1 or ``batch``.
        sin: as ``cos``.
    """
    if on_cpu():
        c, s = to_host(cos), to_host(sin)
        return linear_map(x, lambda v: _turned(v, c, s), lambda g: _turned(g, c, -s))
    first, second = ops.chunk(x, 2, -1)
    return x * cos + ops.concat((-second, first), -1) * sin


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """``softmax(query key^T / sqrt(size) + mask) value``; on CPU it can be differentiated once.

    Args:
        query: ``[batch, heads, length, size]``.
        key: ``[batch, groups, length, size]``; each serves ``heads / groups`` query heads in a row.
        value: as ``key``.
        mask: ``[rows, 1, length, length]``, 0 or minus infinity; ``rows`` is 1 or ``batch``.

    Returns:
        ``[batch, heads, length, size]``.
    """
    if on_cpu():
        result: Tensor = _Attention.apply(query, key, value, mask)
        return result
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (ops.repeat_interleave(t, shared, 1) for t in (key, value))
    scores = ops.BatchMatMul(transpose_b=True)(query * query.shape[-1] ** -0.5, key)
    return ops.matmul(ops.softmax(scores + mask, -1), value)


def _turned(x: Tensor, cos: Any, sin: Any) -> Tensor:
    """The tables have equal halves, so the adjoint turns the other way."""
    host = to_host(x)
    values, c, s = (as_float32(a) for a in (host, cos, sin))
    half = values.shape[-1] // 2
    out: Any = values * c
    out[..., :half] -= values[..., half:] * s[..., :half]
    out[..., half:] += values[..., :half] * s[..., half:]
    return to_tensor(out.astype(host.dtype, copy=False))


class _Attention(_Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        own = to_host(query)
        k, v = as_float32(to_host(key)), as_float32(to_host(value))
        batch, groups, length, size = k.shape
        # query heads that share a key lie next to each other: one product for all of them
        q = as_float32(own).reshape(batch, groups, -1, size)
        weights = q @ (k * np.float32(size**-0.5)).swapaxes(-1, -2)
        by_head = weights.reshape(batch, own.shape[1], length, length)
        by_head += as_float32(to_host(mask))
        weights -= weights.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        ctx.weights = weights
        return to_tensor((weights @ v).reshape(own.shape).astype(own.dtype, copy=False))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights, saved = ctx.weights, ctx.saved_tensors
        own = to_host(saved[0])
        k, v = as_float32(to_host(saved[1])), as_float32(to_host(saved[2]))
        q, upstream = (as_float32(x).reshape(*k.shape[:2], -1, k.shape[-1]) for x in (own, to_host(grads[0])))
        grad_value = weights.swapaxes(-1, -2) @ upstream
        grad = upstream @ v.swapaxes(-1, -2)
        grad -= np.einsum("bgij,bgij->bgi", grad, weights)[..., None]
        grad *= weights
        scale = np.float32(k.shape[-1] ** -0.5)
        grad_query = (grad @ k).reshape(own.shape) * scale
        grad_key = (grad.swapaxes(-1, -2) @ q) * scale
        found = (to_tensor(g.astype(own.dtype, copy=False)) for g in (grad_query, grad_key, grad_value))
        return *(differentiable_once("attention", g, grads[0], *saved) for g in found), None
