"""The interface between the tests and a platform."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hyper_parallel import DeviceMesh, DTensor, init_device_mesh
from tests.conformance import adapters as conformance
from tests.harness import this_world_size
from tests.tensor_parallel.parts import Differentiated, own_part

__all__ = ["Adapter", "Differentiated"]

Tensor = Any
Module = Any
Parameter = Any

class Adapter(ABC):
    """Lives in a worker."""

    counts_changes: bool
    """Whether the framework counts changes in place, so that layers side by side can share what is made of an input."""
    keeps_gradients: bool
    """Whether gradients are kept on parameters."""

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks, as a 1-D mesh."""
        return init_device_mesh("cpu", (this_world_size(),), mesh_dim_names=("tp",))

    @abstractmethod
    def native_group(self, kind: str) -> Any:
        """The framework's own ``"native group"`` or ``"native mesh"`` of all ranks."""

    # -- tensors ---------------------------------------------------------------------------------------------

    def tensor(self, array: Any, dtype: str = "float64") -> Tensor:
        """A plain tensor."""
        return conformance.this_adapter().tensor(np.ascontiguousarray(array), dtype)

    def array(self, x: Any) -> np.ndarray:
        """The local values, as float64 (numbers of other kinds as they are)."""
        values = conformance.this_adapter().numpy(x.to_local() if isinstance(x, DTensor) else x)
        return values.astype(np.float64) if values.dtype.kind == "f" else values

    @abstractmethod
    def dtype(self, name: str) -> Any:
        """The framework's dtype."""

    @abstractmethod
    def turned(self, array: np.ndarray, dtype: str = "float64") -> Tensor:
        """A tensor with these values that is not contiguous."""

    # -- gradients -------------------------------------------------------------------------------------------

    def differentiate(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        parameters: Sequence[Parameter] = (),
        upstream: Any = 1.0,
    ) -> Differentiated:
        """``function(*inputs)``, and the gradients of ``sum(upstream * local value)``; integers have none."""
        with conformance.this_adapter().record_collectives() as seen:
            value, forward, inputs_grads, grads = self._differentiate(
                function, inputs, parameters, upstream, lambda: len(seen)
            )
        return Differentiated(
            self.array(value),
            [None if g is None else self.array(g) for g in inputs_grads],
            [(self.array(g), getattr(p, "_shard_spec", None)) for p, g in zip(parameters, grads, strict=True)],
            dict(Counter(c.name for c in seen[:forward])),
            dict(Counter(c.name for c in seen[forward:])),
        )

    @abstractmethod
    def _differentiate(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        parameters: Sequence[Parameter],
        upstream: Any,
        mark: Callable[[], int],
    ) -> tuple[Tensor, int, list[Tensor | None], list[Tensor]]:
        """The value, ``mark()`` after the forward pass, the gradients."""

    @abstractmethod
    def twice(self, function: Callable[[Tensor], Tensor], x: Tensor, weights: Callable[[Tensor], Tensor]) -> Any:
        """For ``s = sum(w f(x^2))``, ``w`` being ``weights(f(x^2))``: the gradient of s, and that of its sum."""

    # -- modules ---------------------------------------------------------------------------------------------

    @abstractmethod
    def module(self, name: str, *args: Any, **kwargs: Any) -> Module:
        """A module of the platform's file of models, with float64 parameters: the same values on every rank."""

    @abstractmethod
    def named_parameters(self, model: Module) -> dict[str, Parameter]:
        """Each parameter once, by the name that it has in PyTorch's model."""

    @abstractmethod
    def cross_entropy(self, logits: Any, target: Tensor) -> Any:
        """The mean loss, of logits ``[tokens, classes]``."""

    @abstractmethod
    def flat(self, logits: Any) -> Any:
        """``[batch, tokens, classes]`` as ``[batch * tokens, classes]``."""

    def fill(self, parameter: Parameter, whole: np.ndarray) -> None:
        """Give a parameter its part of a whole."""
        from hyper_parallel.platform.modules import get_module_backend

        get_module_backend().fill_parameter(parameter, own_part(whole, getattr(parameter, "_shard_spec", None)))

    @abstractmethod
    def parameter(self, array: np.ndarray) -> Parameter:
        """A parameter of float64."""

