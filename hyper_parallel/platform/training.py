"""What a training job needs of a backend beyond tensors: building, filling and updating a model."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["SHARD_SPEC", "Learner", "Loss", "TrainingTools", "load_training_tools"]

SHARD_SPEC = "_shard_spec"
"""Attribute of a parameter that says how it is cut; a parameter without it is whole on every rank."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Token ids and labels to a scalar on the model's graph."""


class Learner(ABC):
    """The gradients and the AdamW state of one model. No method runs a collective."""

    @abstractmethod
    def accumulate(self, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward, loss, backward; gradients add up until :meth:`update`. Returns the loss, off the graph."""

    @abstractmethod
    def map_gradients(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace all gradients by ``reduce`` of them, given as one flat tensor."""

    @abstractmethod
    def gradient_squares(self) -> tuple[Tensor, Tensor]:
        """Sums of squared gradients: of the cut parameters (this rank's part), and of the whole ones.

        Scalars of at least fp32, on the device of the model.
        """

    @abstractmethod
    def update(self, lr: float, squares: Tensor, max_norm: float | None) -> Tensor:
        """One step of the optimizer; afterwards there are no gradients.

        Args:
            lr: the learning rate.
            squares: sum of squared gradients over all parameters and ranks.
            max_norm: gradients with a larger norm are scaled down to it.

        Returns:
            The norm, ``sqrt(squares)``, before scaling.
        """


class TrainingTools(ABC):
    """How a backend's models are built, changed from outside, and fed."""

    @abstractmethod
    def build(self, constructor: Callable[[], Any]) -> Any:
        """``constructor()`` with parameters that have shapes but no memory."""

    @abstractmethod
    def parameter_shapes(self, model: Any) -> dict[str, tuple[int, ...]]:
        """Name and local shape of each parameter; a shared one under its first name only."""

    @abstractmethod
    def cut_parameter(self, model: Any, name: str, spec: ShardSpec, rank: int) -> None:
        """Let a parameter without memory be what ``spec`` gives ``rank``, and carry ``spec``."""

    @abstractmethod
    def wrap_layer(
        self, model: Any, name: str, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
    ) -> None:
        """Let a layer (by name) compute ``after(layer(before(x)))``; its own code stays as it is."""

    @abstractmethod
    def materialize(self, model: Any, values: Callable[[str, ShardSpec], Any], device_type: str) -> None:
        """Give every parameter memory on this process's device, and the values of ``values(name, spec)``."""

    @abstractmethod
    def learner(self, model: Any, options: Mapping[str, Any]) -> Learner:
        """AdamW over the model; ``options``: ``betas``, ``eps`` and ``weight_decay`` (of matrices only)."""

    @abstractmethod
    def cross_entropy_sum(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """The framework's ordinary cross-entropy of ``[batch, length, classes]``, summed over the tokens."""

    @abstractmethod
    def to_device(self, array: Any, device_type: str) -> Tensor:
        """A NumPy array as a tensor on this process's device."""

    @abstractmethod
    def seed(self, seed: int, device_type: str) -> None:
        """Seed the framework's generators, and choose this process's device."""

    @abstractmethod
    def peak_memory(self, device_type: str) -> int:
        """Most bytes ever in use: the allocator's on an accelerator, the whole process's on CPU."""

    @abstractmethod
    def close(self) -> None:
        """Leave the process group, if there is one."""


def load_training_tools() -> TrainingTools:
    """Those of this process's backend."""
    module = importlib.import_module(f"hyper_parallel.platform.{get_platform().name}.training")
    tools: TrainingTools = module.create_training_tools()
    return tools
