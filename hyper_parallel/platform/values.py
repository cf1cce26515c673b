"""Plain values that pass between a backend and the rest of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Group", "LossArguments", "NativeDTensor", "NativeMesh", "StandIn", "Tensor"]

Tensor = Any
"""A tensor of the backend; only the backend's own folder looks inside."""


@dataclass(frozen=True, eq=False)
class Group:
    """A process group, whatever the backend.

    Attributes:
        ranks: global ranks, in group order.
        handle: the backend's group object or name; None where the group has one member and needs none.
        rank: this process's index in ``ranks``.
    """

    ranks: tuple[int, ...]
    handle: Any
    rank: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass(frozen=True)
class NativeMesh:
    """What a backend's own mesh object says of itself."""

    device_type: str
    ranks: Any
    dim_names: tuple[str, ...] | None
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class NativeDTensor:
    """The framework's own distributed tensor, taken apart.

    ``placements`` are ``("shard", dim)``, ``("replicate", None)`` or ``("partial", reduce_op)``; ``mesh`` is the
    framework's mesh.
    """

    local: Any
    mesh: Any
    placements: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LossArguments:
    """The arguments of a cross-entropy family call, whatever the backend's spelling.

    ``kind`` is ``"cross_entropy"``, ``"log_softmax"`` or ``"nll_loss"``; ``dim`` is log_softmax's dim.
    """

    kind: str
    input: Any
    target: Any = None
    weight: Any = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    dim: int | None = None
    dtype: Any = None


class StandIn:
    """Something in the place of a tensor, that is no tensor: asked before the framework's functions run on it.

    PyTorch asks by ``__torch_function__`` for every function; MindSpore where functions are routed to the library: the
    losses.
    """

    @classmethod
    def _dispatch(cls, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the function."""
        raise NotImplementedError(f"{cls.__name__} must define _dispatch")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls._dispatch(func, args, kwargs or {})
