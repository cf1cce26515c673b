"""Differentiable maps with explicit derivatives.

MindSpore's ``_Function`` works in PyNative mode, which is the mode of this library: communication in ``backward``,
gradients of gradients and ``nn.Cell`` included. It does not work under ``@jit`` or in graph mode. Whoever compiles a
model writes the same adjoint as ``nn.Cell.bprop`` of a cell of their own, over the same operators
(``group.handle.operator("AllReduce", "sum")``): ``bprop(self, *inputs, out, dout)`` is honoured by the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.common._grad_function import _Function
from mindspore.common.api import _pynative_executor

from hyper_parallel.platform.mindspore._graph_capture import refuse_in_trace
from hyper_parallel.platform.mindspore._host import as_float32, on_cpu, to_host, to_tensor

__all__ = ["as_input", "differentiable_once", "linear_map", "requires_grad", "sum_all"]

Map = Callable[[Tensor], Tensor]


class _LinearMap(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, adjoint: Map, again: Map) -> Tensor:
        ctx.maps = (adjoint, again)
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        adjoint, again = ctx.maps
        return linear_map(grads[0], adjoint, again, adjoint), None, None, None


def linear_map(x: Tensor, forward: Map, adjoint: Map, again: Map | None = None) -> Tensor:
    """``forward(x)``; its gradient is ``adjoint``, whose gradient is ``again`` (default: ``forward``), and so on."""
    refuse_in_trace("a map with a derivative of its own, as all regions are, is called")
    if not requires_grad(x):
        return forward(x)
    result: Tensor = _LinearMap.apply(as_input(x), forward, adjoint, again or forward)
    return result


class _Once(_Function):
    @staticmethod
    def forward(ctx: Any, name: str, grad: Tensor, *inputs: Tensor) -> Tensor:
        ctx.name = name
        return grad * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name} cannot be differentiated twice: its gradient has no derivative")


def differentiable_once(name: str, grad: Tensor, *inputs: Tensor) -> Tensor:
    """``grad``, computed by the backward of ``name`` without being recorded.

    While that backward is recorded itself, ``grad`` is tied to the ``inputs`` it depends on: differentiating it raises,
    instead of taking it for a constant.
    """
    if any(requires_grad(x) for x in inputs):
        result: Tensor = _Once.apply(name, grad, *inputs)
        return result
    return grad


def as_input(x: Tensor) -> Tensor:
    """``x`` as a ``_Function`` takes it: that one holds gradients against the shape that a parameter had when it was
    created, and not against what it was cut down to since."""
    return x.view(x.shape) if isinstance(x, Parameter) else x


def requires_grad(x: Tensor) -> bool:
    """Whether operators on ``x`` are being recorded."""
    executor = _pynative_executor
    return bool(executor.grad_flag() and executor.enable_grad() and x._requires_grad)


def sum_all(x: Tensor) -> Tensor:
    """The sum of all elements, a scalar of the same dtype.

    MindSpore's CPU kernel adds up one after the other in float32, and leaves a sum of nothing uninitialised; so there
    NumPy sums, in float64.
    """
    shape = x.shape
    if not on_cpu():
        return ops.sum(x)

    def add_up(values: Tensor) -> Tensor:
        host = to_host(values)
        total = as_float32(host).sum(dtype=np.float64) if host.size else np.float64(0.0)
        return to_tensor(np.asarray(total, np.float64).astype(host.dtype))

    def spread(total: Tensor) -> Tensor:
        host = to_host(total)
        return to_tensor(np.full(shape, as_float32(host)).astype(host.dtype))

    return linear_map(x, add_up, spread)
