"""What a training job needs of a backend beyond tensors and modules: gradients, the optimizer, the process."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import Module, Parameter
from hyper_parallel.platform.platform import Tensor

if TYPE_CHECKING:
    from hyper_parallel.core.device_mesh import DeviceMesh

__all__ = ["Learner", "Loss", "ModelSettings", "TrainingTools", "absent_settings", "load_training_tools"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""Token ids and labels to a scalar on the model's graph."""


@dataclass(frozen=True)
class ModelSettings:
    """How the framework shall run a model that is otherwise ordinary code.

    Attributes:
        data_mesh: the ranks that hold different tokens, 1-D; None: this rank alone.
        data_parallel: ``"replicate"`` (nothing is done here), ``"ddp"`` or ``"fsdp"``.
        compute_dtype: of forward and backward; with ``"bfloat16"`` the optimizer keeps float32.
        activation_checkpoint: ``"none"``, or ``"full"``: layers keep their input alone.
        compile: whether layers are compiled.
        compile_backend: by what.
    """

    data_mesh: DeviceMesh | None = None
    data_parallel: str = "replicate"
    compute_dtype: str = "float32"
    activation_checkpoint: str = "none"
    compile: bool = False
    compile_backend: str = "inductor"


_FIXED: Mapping[str, Mapping[str, Any]] = {
    "mindspore": {
        "data_parallel": "replicate",
        "compute_dtype": "float32",
        "compile": False,
    }
}
"""What is not there on a backend: settings with the only value they may have."""


def absent_settings(backend: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``asked`` (fields of :class:`ModelSettings`) a backend has not, with what it has.

    Example:
        >>> absent_settings("mindspore", {"compile": True, "compute_dtype": "float32"})
        {'compile': False}
    """
    fixed = _FIXED.get(backend, {})
    return {name: fixed[name] for name, value in asked.items() if name in fixed and value != fixed[name]}


class Learner(ABC):
    """The gradients and the AdamW state of one model. Runs no collective of its own, except where
    :attr:`sums_over_data` says so.
    """

    model: Module
    """What to call; usually the model that was given."""

    parameters: list[Parameter]
    """Those that are trained."""

    sums_over_data: bool = False
    """Whether gradients are already summed over the data-parallel ranks when backward ends."""

    def announce_part(self, last: bool) -> None:  # noqa: B027 - only some have something to do
        """Told before each :meth:`accumulate`, whether it is the last one before :meth:`update`."""

    @abstractmethod
    def accumulate(self, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward, loss, backward; gradients add up until :meth:`update`. Returns the loss, off the graph."""

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """What was accumulated, one for each of ``parameters``; may be changed in place."""

    @abstractmethod
    def map_gradients(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace all gradients by ``reduce`` of them, given as one flat tensor."""

    @abstractmethod
    def update(self, lr: float) -> None:
        """One step of the optimizer; afterwards there are no gradients."""

    @abstractmethod
    def moments(self) -> Mapping[str, list[Tensor]]:
        """AdamW's ``exp_avg`` and ``exp_avg_sq``: a local tensor for each of ``parameters``, cut as that one is. Where
        the model computes in fewer bits, also ``float32``: what the parameters are rounded from.

        Zeros before the first :meth:`update`. They are the optimizer's own: what a checkpoint writes into them counts.
        """

    @property
    @abstractmethod
    def updates(self) -> int:
        """How often :meth:`update` was called; AdamW's bias correction depends on it. Can be set."""

    @updates.setter
    @abstractmethod
    def updates(self, count: int) -> None: ...


class TrainingTools(ABC):
    """How a backend's models are built and fed."""

    @abstractmethod
    def build(self, constructor: Callable[[], Module]) -> Module:
        """``constructor()`` with parameters that have shapes but no memory."""

    @abstractmethod
    def learner(
        self, model: Module, options: Mapping[str, Any], settings: ModelSettings | None = None
    ) -> Learner:
        """AdamW over the model; ``options``: ``betas``, ``eps`` and ``weight_decay`` (of matrices only).

        Args:
            settings: how the framework shall run it; None: as it is. Collective over the data-parallel ranks
                unless they replicate.

        Raises:
            ValueError: a setting that this backend has not.
        """

    @abstractmethod
    def cross_entropy_sum(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """The framework's ordinary cross-entropy of ``[batch, length, classes]``, summed over the tokens; at least
        in float32.
        """

    @abstractmethod
    def evaluating(self, model: Module) -> AbstractContextManager[None]:
        """Inside it the model runs without dropout and its like, and no graph is kept."""

    @abstractmethod
    def recomputed(self, function: Callable[..., Tensor], module: Module, *tensors: Tensor) -> Tensor:
        """``function(*tensors)``, whose inner values are not kept: backward runs it again. Of parameters, it may use
        those of ``module`` alone.
        """

    @abstractmethod
    def to_device(self, array: Any, device_type: str) -> Tensor:
        """A NumPy array as a tensor on this process's device."""

    @abstractmethod
    def seed(self, seed: int, device_type: str) -> None:
        """Choose this process's device, and seed the framework's generators."""

    @abstractmethod
    def rng_state(self, device_type: str) -> dict[str, str]:
        """The state of each of the framework's generators in this process, by name, as Base64."""

    @abstractmethod
    def set_rng_state(self, state: Mapping[str, str], device_type: str) -> None:
        """Go on where :meth:`rng_state` was asked. Raises ValueError for the state of other generators."""

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
