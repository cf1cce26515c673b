"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), which MindSpore's CPU backend has no kernel for."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.platform.mindspore._host import as_float32, on_cpu, to_host, to_tensor
from hyper_parallel.platform.mindspore.custom_grad import as_input, differentiable_once

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dim, of any dtype; the norm itself in float32.

    On CPU it is one pass of NumPy each way, and can be differentiated once: of MindSpore's operators there, those that
    broadcast take most of the time of a small model.

    Example:
        >>> rms_norm(Tensor([[3.0, 4.0]]), Tensor([1.0, 1.0]), 0.0)                              # doctest: +SKIP
        [[0.8485, 1.1314]]
    """
    if on_cpu():
        result: Tensor = _RMSNorm.apply(x, as_input(weight), eps)
        return result
    wide = x.astype(mindspore.float32)
    scale = ops.rsqrt(ops.mean(ops.square(wide), -1, True) + eps)
    return (wide * scale).astype(x.dtype) * weight


class _RMSNorm(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        own = to_host(x)
        rows, gain = as_float32(own).reshape(-1, own.shape[-1]), as_float32(to_host(weight))
        scale = 1 / np.sqrt(np.einsum("nh,nh->n", rows, rows)[:, None] / np.float32(rows.shape[1]) + np.float32(eps))
        normed = rows * scale
        ctx.scale = scale
        return to_tensor((as_float32(normed.astype(own.dtype)) * gain).astype(own.dtype).reshape(own.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale, (x, weight) = ctx.scale, ctx.saved_tensors
        own, host = to_host(x), to_host(grads[0])
        gain = as_float32(to_host(weight))
        normed = as_float32(own).reshape(-1, own.shape[-1]) * scale
        upstream = as_float32(host).reshape(normed.shape)
        inner = upstream * gain
        dot = np.einsum("nh,nh->n", inner, normed)[:, None] / np.float32(normed.shape[1])
        grad_x = (inner - normed * dot) * scale
        grad_weight = (upstream * normed).sum(0, dtype=np.float64)
        found = grad_x.astype(own.dtype).reshape(own.shape), grad_weight.astype(to_host(weight).dtype)
        return *(differentiable_once("rms_norm", to_tensor(g), grads[0], x, weight) for g in found), None
