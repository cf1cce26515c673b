"""The one ContextVar: what the code that is running right now, in this thread, has switched on.

It holds the changes of all contexts that are open, in the order of entering. Leaving one takes out its own and leaves
the others, whatever the order: suspended generators need not be closed last in, first out, nor where they were started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """Immutable: the defaults with the changes of all open contexts, later ones winning."""

    config: ParallelismConfig = field(default_factory=ParallelismConfig)
    skip_dispatch: bool = False
    loss_parallel: bool = False
    strict: bool = True
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class _Open:
    """The open contexts' changes, outermost first, and what they make together."""

    changes: tuple[Mapping[str, Any], ...] = ()
    state: State = field(default_factory=State)


_NOTHING = _Open()
_open: ContextVar[_Open] = ContextVar("hyper_parallel_state", default=_NOTHING)


def current_state() -> State:
    """The state of this thread and context."""
    return _open.get().state


@contextmanager
def changed_state(**changes: Any) -> Iterator[State]:
    """Change some fields inside a ``with``; always taken back, also by an exception."""
    _put(*_open.get().changes, changes)
    try:
        yield current_state()
    finally:
        _put(*(other for other in _open.get().changes if other is not changes))


def _put(*changes: Mapping[str, Any]) -> None:
    state = State()
    for change in changes:
        state = replace(state, **change)
    _open.set(_Open(changes, state))


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
