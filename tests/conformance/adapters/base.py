"""The interface between the suite and a platform."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Adapter", "Collective", "Differentiated"]

Tensor = Any


@dataclass(frozen=True)
class Collective:
    """One collective that ran on this rank: its name (``"all_reduce"``, ``"all_gather"``, ...) and what it sent."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Differentiated:
    """A value and its gradient, with the names of their dtypes (bfloat16 comes as float32 values)."""

    value: np.ndarray
    value_dtype: str
    grad: np.ndarray
    grad_dtype: str


class Adapter(ABC):
    """Lives in a worker. Tensors are the framework's; DTensors those of the library."""

    device_type = "cpu"
    plain_target_dtype = "int64"
    """Integer dtype that the framework's own loss takes."""

    @abstractmethod
    def tensor(self, array: Any, dtype: str) -> Tensor:
        """A plain tensor of ``dtype``."""

    @abstractmethod
    def numpy(self, x: Tensor) -> np.ndarray:
        """The values of a plain tensor, bfloat16 as float32."""

    @abstractmethod
    def dtype(self, x: Tensor) -> str:
        """NumPy's name of the dtype."""

    @abstractmethod
    def value_and_grad(self, function: Callable[[Tensor], Tensor], x: Tensor, upstream: Any = 1.0) -> Differentiated:
        """``function(x)`` (plain to plain), and the gradient of ``sum(upstream * function(x))``.

        The backward pass runs after ``function`` has returned.
        """

    @abstractmethod
    def cross_entropy(self, entry: str, logits: Any, target: Any, **options: Any) -> Any:
        """The loss as a user writes it, ``entry`` being one of ``groups.ENTRIES``."""

    @abstractmethod
    def loss_functions(self) -> list[Any]:
        """Every function of the framework through which a cross-entropy can be computed."""

    @abstractmethod
    def log_softmax(self, x: Any, dim: int) -> Any:
        """The framework's function."""

    @abstractmethod
    def nll_loss(self, log_probs: Any, target: Any, **options: Any) -> Any:
        """The framework's function."""

    @abstractmethod
    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Reshape a plain or distributed tensor, one size -1."""

    @abstractmethod
    def transpose(self, x: Tensor) -> Tensor:
        """Swap the two dims of a plain tensor, without a copy where the framework can."""

    @abstractmethod
    def narrow(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        """A part of a plain tensor, without a copy where the framework can."""

    @abstractmethod
    def wrap(self, entry: str, local: Tensor, mesh: Any, placements: Any, shape: Any) -> Any:
        """The distributed tensor that ``entry`` takes: the library's or the framework's own."""

    @abstractmethod
    def unwrap(self, x: Any) -> Tensor:
        """The local tensor of either, on the same graph; a plain tensor as it is."""

    @abstractmethod
    def kind_of(self, x: Any) -> str:
        """``"ours"``, ``"native"`` or ``"plain"``."""

    @abstractmethod
    def host_number(self, x: Any) -> float:
        """What ``.item()`` and ``float()`` of a scalar loss show (both, and equal); collective."""

    @abstractmethod
    def elsewhere(self, x: Tensor) -> Tensor:
        """The tensor on another device than :attr:`device_type`."""

    @abstractmethod
    def record_collectives(self) -> AbstractContextManager[list[Collective]]:
        """Gathers what the library sends, in order, the header of the agreement included."""

    @abstractmethod
    def bytes_kept(self, function: Callable[[Tensor], Tensor], x: Tensor) -> int | None:
        """Bytes that ``function(x)`` keeps for its backward, beyond ``x``; None where that cannot be measured."""
