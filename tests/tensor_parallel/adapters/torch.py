"""PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor
from tests.harness import this_world_size
from tests.tensor_parallel.adapters import torch_modules
from tests.tensor_parallel.adapters.base import Adapter

__all__ = ["make_adapter"]


def make_adapter() -> Adapter:
    return TorchAdapter()


class TorchAdapter(Adapter):
    counts_changes = True
    keeps_gradients = True

    def native_group(self, kind: str) -> Any:
        if kind == "native mesh":
            return torch.distributed.init_device_mesh("cpu", (this_world_size(),))
        return torch.distributed.group.WORLD

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, name)

    def turned(self, array: np.ndarray, dtype: str = "float64") -> torch.Tensor:
        return self.tensor(array.T, dtype).T

    def _differentiate(
        self,
        function: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.nn.Parameter],
        upstream: Any,
        mark: Callable[[], int],
    ) -> Any:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        for p in parameters:
            p.grad = None
        y = function(*leaves)
        forward = mark()
        local = y.to_local() if isinstance(y, DTensor) else y
        local.backward(torch.as_tensor(np.broadcast_to(upstream, local.shape).copy()).to(local.dtype))
        return local, forward, [x.grad for x in leaves], [p.grad for p in parameters]

    def twice(self, function: Any, x: torch.Tensor, weights: Any) -> Any:
        x = x.detach().requires_grad_()
        y = function(x.square())
        (grad,) = torch.autograd.grad((weights(y) * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        return self.array(grad), self.array(second)

    def module(self, name: str, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = getattr(torch_modules, name)(*args, **kwargs).double()
        for seed, parameter in enumerate(self.named_parameters(model).values()):
            self.fill(parameter, np.random.default_rng(seed).standard_normal(parameter.shape) / 2)
        return model

    def named_parameters(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return dict(model.named_parameters())

    def cross_entropy(self, logits: Any, target: torch.Tensor) -> Any:
        return F.cross_entropy(logits, target)

    def flat(self, logits: Any) -> Any:
        return logits.flatten(0, 1)

    def parameter(self, array: np.ndarray) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.tensor(array))
