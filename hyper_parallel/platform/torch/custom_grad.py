"""Differentiable linear maps with an explicit adjoint, and gradients that have no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["differentiable_once", "linear_map"]

Map = Callable[[torch.Tensor], torch.Tensor]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Map, adjoint: Map, again: Map) -> torch.Tensor:
        ctx.maps = (adjoint, again)
        y = forward(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        adjoint, again = ctx.maps
        return _LinearMap.apply(grads[0], adjoint, again, adjoint), None, None, None


def linear_map(x: torch.Tensor, forward: Map, adjoint: Map, again: Map | None = None) -> torch.Tensor:
    """``forward(x)``; its gradient is ``adjoint``, whose gradient is ``again`` (default: ``forward``), and so on."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return forward(x)
    result: torch.Tensor = _LinearMap.apply(x, forward, adjoint, again or forward)
    return result


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, grad: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError(f"{ctx.name} cannot be differentiated twice: its gradient has no derivative")


def differentiable_once(name: str, grad: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """``grad``, computed by the backward of ``name`` without being recorded.

    Under ``create_graph=True`` it is tied to the ``inputs`` it depends on, and differentiating it raises. (PyTorch's
    ``once_differentiable`` takes it for a constant where only the upstream gradient does not require one.)
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _Once.apply(name, grad, *inputs)
    return grad
