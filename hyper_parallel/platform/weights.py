"""What a backend owes checkpoints and materialisation: memory for parameters, and their bytes."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import Module
from hyper_parallel.platform.platform import Tensor

__all__ = ["BlockReader", "BlockWriter", "Buffer", "BufferPlan", "Draw", "Slot", "WeightBackend", "get_weight_backend"]

Slot = tuple[Module, str]
"""A module and the name under which it holds a tensor."""


@dataclass(frozen=True)
class Buffer:
    """A tensor that a module keeps beside its parameters; a persistent one is part of checkpoints."""

    tensor: Tensor
    persistent: bool


@dataclass(frozen=True)
class Draw:
    """How the values of a parameter are drawn at first.

    Attributes:
        kind: ``"normal"`` (mean, std), ``"uniform"`` (low, high) or ``"constant"`` (value).
        numbers: those of the kind.
        zero_rows: indices of dim 0 that are zero nevertheless (an embedding's padding).
    """

    kind: str
    numbers: tuple[float, ...]
    zero_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class BufferPlan:
    """Values for buffers without memory.

    Attributes:
        values: the holder of each, and what it shall hold; of the backend alone.
        unset: names of those that nobody knows how to compute.
    """

    values: Sequence[tuple[Slot, Any]]
    unset: tuple[str, ...]


class BlockWriter(ABC):
    """Fills one tensor from its first element to its last."""

    @abstractmethod
    def put(self, start: int, raw: Any, dtype: str) -> None:
        """Cast and store some elements.

        Args:
            start: index of the first one in the row-major tensor.
            raw: their bytes, a uint8 NumPy array; may change after the call.
            dtype: what they are, as NumPy spells it (``"bfloat16"`` too).
        """

    @abstractmethod
    def close(self) -> None:
        """All elements are there."""


class BlockReader(ABC):
    """Gives the bytes of one tensor."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Any:
        """Bytes ``[start, stop)`` of the row-major tensor: a uint8 NumPy array, for reading only."""


class WeightBackend(ABC):
    """Memory and bytes of one framework's parameters and buffers."""

    @abstractmethod
    def own_buffers(self, module: Module) -> dict[str, Buffer]:
        """The module's own buffers by name, not those of its children."""

    @abstractmethod
    def allocate(self, slots: Sequence[Slot], tensor: Tensor, device_type: str) -> Tensor:
        """Give a parameter or buffer memory with undefined content.

        Args:
            slots: everybody who holds ``tensor``; all get the new one, so ties hold.
            tensor: has a shape, no memory, and marks that the new one carries as well.
            device_type: ``"cpu"``, ``"cuda"``, ``"npu"``: this process's device of that type.
        """

    @abstractmethod
    def writer(self, tensor: Tensor) -> BlockWriter:
        """Fill a tensor that has memory, off the graph."""

    @abstractmethod
    def reader(self, tensor: Tensor) -> BlockReader:
        """Read a tensor that has memory; one that is not row-major is copied once."""

    @abstractmethod
    def plan_buffers(self, model: Module) -> BufferPlan:
        """Compute the values of all buffers that have no memory and are not persistent. Changes nothing."""

    @abstractmethod
    def set_buffers(self, plan: BufferPlan, device_type: str) -> None:
        """Store what was computed, in the dtype that the buffers had."""

    @abstractmethod
    def initial_draws(self, model: Module) -> Mapping[int, Draw | str]:
        """How the model's own code would draw each parameter without memory, by ``id``; in words why not, else.

        Distributions are those of the whole parameter, wherever it is cut.
        """

    @abstractmethod
    def without_memory(self, model: Module) -> list[str]:
        """Names of everything in the model that has a shape and no memory."""

    @abstractmethod
    def reshard(self, model: Module) -> None:
        """Give up what the framework has gathered of parameters that it shards (FSDP2 keeps the last layer's after a
        forward without backward), so that the model holds its own parts alone. No collective.
        """

    @abstractmethod
    def empty_on(self, device_type: str) -> Tensor:
        """A tensor without elements on this process's device of that type."""


@lru_cache(maxsize=1)
def get_weight_backend() -> WeightBackend:
    """The one of this process's platform."""
    module = importlib.import_module(f"hyper_parallel.platform.{get_platform().name}.weights")
    backend: WeightBackend = module.create_weight_backend()
    return backend
