"""MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import GlobalComm

from hyper_parallel import DTensor, get_platform
from tests.tensor_parallel.adapters import mindspore_modules
from tests.tensor_parallel.adapters.base import Adapter

__all__ = ["make_adapter"]

_NAMES = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}


def make_adapter() -> Adapter:
    return MindSporeAdapter()


class MindSporeAdapter(Adapter):
    counts_changes = False
    keeps_gradients = False

    def native_group(self, kind: str) -> str:
        assert kind == "native group", "there is no mesh"
        return str(GlobalComm.WORLD_COMM_GROUP)

    def dtype(self, name: str) -> Any:
        return getattr(mindspore, name)

    def turned(self, array: np.ndarray, dtype: str = "float64") -> Tensor:
        x = self.tensor(array.T, dtype).T
        assert x.ndim < 2 or min(x.shape) < 2 or not x.is_contiguous()
        return x

    def _differentiate(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        parameters: Sequence[Parameter],
        upstream: Any,
        mark: Callable[[], int],
    ) -> Any:
        platform = get_platform()
        seen: list[Any] = []

        def weighted(*xs: Tensor) -> Tensor:
            y = function(*xs)
            local = y.to_local() if isinstance(y, DTensor) else y
            assert platform.requires_grad(local), "the result is not attached to the graph"
            seen[:] = [local, mark()]
            weight = self.tensor(np.broadcast_to(upstream, local.shape), str(local.dtype).lower())
            return platform.linear_map(local, lambda _: Tensor(np.float32(0)), lambda _: weight)

        floating = [i for i, x in enumerate(inputs) if platform.is_floating_point(x)]
        positions = tuple(floating) or None
        found = mindspore.grad(weighted, positions, list(parameters) or None)(*inputs)
        of_inputs, of_parameters = found if floating and parameters else (found, found)
        by_place = dict(zip(floating, _as_tuple(of_inputs), strict=True)) if floating else {}
        return (
            *seen,
            [by_place.get(i) for i in range(len(inputs))],
            list(_as_tuple(of_parameters)) if parameters else [],
        )

    def twice(self, function: Any, x: Tensor, weights: Any) -> Any:
        def first(x: Tensor) -> Tensor:
            y = function(x * x)
            return ops.sum(weights(y) * y)

        grad = mindspore.grad(first)
        return self.array(grad(x)), self.array(mindspore.grad(lambda x: ops.sum(grad(x)))(x))

    def module(self, name: str, *args: Any, **kwargs: Any) -> nn.Cell:
        model: nn.Cell = getattr(mindspore_modules, name)(*args, **kwargs)
        for seed, parameter in enumerate(self.named_parameters(model).values()):
            parameter.set_dtype(mindspore.float64)
            self.fill(parameter, np.random.default_rng(seed).standard_normal(parameter.shape) / 2)
        return model

    def named_parameters(self, model: nn.Cell) -> dict[str, Parameter]:
        found = {}
        for name, parameter in model.parameters_and_names():
            path, dot, own = name.rpartition(".")
            found[path + dot + _NAMES.get(own, own)] = parameter
        return found

    def cross_entropy(self, logits: Any, target: Tensor) -> Any:
        return ops.cross_entropy(logits, target.astype(mindspore.int32))

    def flat(self, logits: Any) -> Any:
        return ops.reshape(logits, (-1, logits.shape[-1]))

    def parameter(self, array: np.ndarray) -> Parameter:
        return Parameter(self.tensor(array))


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)
