"""Norms of gradients, and scaling them where they are."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore
import numpy as np
from mindspore import Tensor, _no_grad, ops

from hyper_parallel.platform.mindspore._host import as_float32, on_cpu, to_host, to_tensor

__all__ = ["clip_factor", "power_sum", "root", "scale"]


def power_sum(tensors: Sequence[Tensor], order: float, like: Tensor) -> Tensor:
    """``sum |x|^order``, or the largest ``|x|``, over all elements; a scalar of float32, of float64 where one is."""
    found = [t for t in tensors if t.size]
    wide = mindspore.float64 if any(t.dtype == mindspore.float64 for t in (like, *tensors)) else mindspore.float32
    largest = order == float("inf")
    if on_cpu():
        total = _on_host(found, order)
        return to_tensor(np.asarray(total, np.float64 if wide == mindspore.float64 else np.float32))
    with _no_grad():
        if not found:
            return ops.zeros((), wide)
        sizes = [ops.abs(t.astype(wide)) for t in found]
        terms = [ops.amax(s) if largest else ops.sum(ops.pow(s, order)) for s in sizes]
        stacked = ops.stack(terms)
        return ops.amax(stacked) if largest else ops.sum(stacked)


def root(x: Tensor, order: float) -> Tensor:
    """``x ** (1 / order)``. On CPU in NumPy: MindSpore takes a Python number for a float32, beside float64 too."""
    if on_cpu():
        host = to_host(x)
        return to_tensor(np.asarray(host ** host.dtype.type(1 / order)))
    with _no_grad():
        return ops.pow(x, 1 / order)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``min(max_norm / (norm + 1e-6), 1)``; NaN stays."""
    if on_cpu():
        host = to_host(norm)
        kind = host.dtype.type
        with np.errstate(invalid="ignore"):
            return to_tensor(np.asarray(np.minimum(kind(max_norm) / (host + kind(1e-6)), kind(1))))
    with _no_grad():
        factor = max_norm / (norm + 1e-6)
        return ops.where(factor > 1, ops.ones_like(factor), factor)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply them in place.

    ``x.mul_(y)`` leaves x as it is on MindSpore's CPU backend, and ``x.copy_(y)`` mixes up a view (the gradient of a
    weight is often one), so the products are assigned. Gradients of several parameters may be one and the same memory:
    all products are taken before the first is assigned.
    """
    with _no_grad():
        scaled = [(g * factor).astype(g.dtype) for g in gradients]
        for gradient, product in zip(gradients, scaled):
            gradient.assign_value(product)


def _on_host(tensors: Sequence[Tensor], order: float) -> float:
    """In float64 by NumPy: MindSpore's CPU kernel adds up one after the other in float32."""
    total = 0.0
    for tensor in tensors:
        values = np.abs(as_float32(to_host(tensor)))
        if order == float("inf"):
            total = float(np.maximum(total, values.max()))  # NaN stays
        elif order == 2.0:
            flat = values.ravel().astype(np.float64)
            total += float(flat @ flat)
        else:
            total += float((values.astype(np.float64) ** order).sum())
    return total
