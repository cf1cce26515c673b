"""The vocabulary of wrong calls of the loss: what a rank does, and the error that every rank must raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.conformance.adapters import Adapter

__all__ = [
    "CLASSES",
    "LAYOUT",
    "TOKENS",
    "UNSUPPORTED",
    "BadCall",
    "Call",
    "changes",
    "on_last",
    "placements",
    "with_options",
]

TOKENS, CLASSES = 4, 8
LAYOUT, UNSUPPORTED = "LossParallelLayoutError", "LossParallelUnsupportedError"


@dataclass
class Call:
    """The arguments of one rank; a bad call changes some of them."""

    adapter: Adapter
    rank: int
    last: bool
    """Whether this is the last rank, which is the one to differ where ranks disagree."""
    mesh: Any
    shape: tuple[int, ...] = (TOKENS, CLASSES)
    shards: tuple[int | None, ...] = (1,)
    dtype: str = "float32"
    target: Any = None
    entry: str = "function"
    options: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> np.ndarray:
        """A good target."""
        return np.arange(self.shape[0]) % CLASSES

    def integers(self, array: Any, dtype: str = "int64") -> Any:
        return self.adapter.tensor(np.asarray(array), dtype)

    def floats(self, *shape: int) -> Any:
        return self.adapter.tensor(np.ones(shape), "float32")

    def distributed(self, local: Any, *placements: Any, shape: tuple[int, ...] | None = None) -> Any:
        from hyper_parallel import DTensor

        return DTensor.from_local(local, self.mesh, list(placements), shape=shape)


@dataclass(frozen=True)
class BadCall:
    """What is wrong, and what is to be raised.

    Attributes:
        change: does the wrong thing to a good call.
        error: type of the exception.
        says: parts of its message: what was found and what was expected.
        mesh: the mesh; None: all ranks share the classes.
        only: the platforms on which it can be tried; None: all.
    """

    change: Callable[[Call], None]
    error: str
    says: tuple[str, ...]
    mesh: tuple[int, ...] | None = None
    only: tuple[str, ...] | None = None
    same_text: bool = True
    """False where no rank can know of the others: each names its own part."""


def changes(**values: Any) -> Callable[[Call], None]:
    """Set fields of the call; a function of the call gives the value on its rank."""

    def change(call: Call) -> None:
        for name, value in values.items():
            setattr(call, name, value(call) if callable(value) else value)

    return change


def on_last(change: Callable[[Call], None]) -> Callable[[Call], None]:
    """Only the last rank does it."""

    def changed(call: Call) -> None:
        if call.last:
            change(call)

    return changed


def with_options(**options: Any) -> Callable[[Call], None]:
    """Set options of the loss, as :func:`changes` does."""
    return changes(options=lambda call: {k: v(call) if callable(v) else v for k, v in options.items()})


def placements(*names: str) -> list[Any]:
    """Placements by short names."""
    from hyper_parallel import Partial, Replicate, Shard

    return [{"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}[name] for name in names]
