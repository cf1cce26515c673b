"""Differentiable linear maps with an explicit adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["linear_map"]

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
