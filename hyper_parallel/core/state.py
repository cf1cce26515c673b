"""The one ContextVar: what the code that is running right now, in this thread, has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.config import ParallelismConfig

if TYPE_CHECKING:
    from hyper_parallel.core.device_mesh import DeviceMesh

__all__ = ["State", "SkipDTensorDispatch", "changed_state", "current_state"]


@dataclass(frozen=True)
class State:
    """Immutable; entering a context puts a changed copy in the ContextVar and leaving it puts the old one back."""

    config: ParallelismConfig = field(default_factory=ParallelismConfig)
    skip_dispatch: bool = False
    loss_parallel: bool = False
    strict: bool = True
    mesh: DeviceMesh | None = None


_DEFAULT = State()
_state: ContextVar[State] = ContextVar("hyper_parallel_state", default=_DEFAULT)


def current_state() -> State:
    """The state of this thread and context."""
    return _state.get()


@contextmanager
def changed_state(**changes: Any) -> Iterator[State]:
    """Change some fields inside a ``with``; always restored, also by an exception."""
    state = replace(_state.get(), **changes)
    token = _state.set(state)
    try:
        yield state
    finally:
        _state.reset(token)


@contextmanager
def SkipDTensorDispatch() -> Iterator[None]:  # noqa: N802 - reads as the class it stands for
    """Inside it, operators see DTensors as the plain local tensors that they are, and give plain local tensors.

    For code that knows what it does with shards, such as an optimizer step written by hand.

    Example:
        >>> with SkipDTensorDispatch():                       # doctest: +SKIP
        ...     local = dtensor + 1
    """
    with changed_state(skip_dispatch=True):
        yield
