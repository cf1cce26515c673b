"""What parent and workers say to each other: a function by name, its arguments, its result as plain values.

Both ends are this project's own tests, so pickle is fine here. Framework objects are refused on the way back:
the parent compares NumPy arrays and must not import a framework to do so.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

_FRAMEWORKS = frozenset({"torch", "mindspore"})


class Raised(NamedTuple):
    """An exception that a rank was expected to raise; equal to the tuple (type name, message)."""

    type: str
    message: str


@dataclass(frozen=True)
class Call:
    """A function of a module, by name, and how to call it."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: tuple[str, ...]  # the parent's sys.path: where the worker finds the same modules

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Success:
    """A rank's return value."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """A rank's exception, as text: its type may not exist in the parent."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(type(error).__name__, str(error), text)


@dataclass(frozen=True)
class Ready:
    """A worker has joined its process group."""


Message = Call | Success | Failure | Ready


class _PlainPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        kind = obj if isinstance(obj, type) else type(obj)
        if kind.__module__.partition(".")[0] in _FRAMEWORKS:
            raise TypeError(
                f"a distributed function returned a {kind.__module__}.{kind.__qualname__}; "
                "expected NumPy arrays and plain Python values"
            )


def encode(message: Message) -> bytes:
    """Bytes of `message`. Raises TypeError for a return value that holds a framework's object."""
    buffer = io.BytesIO()
    pickler = _PlainPickler if isinstance(message, Success) else pickle.Pickler
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def decode(data: bytes) -> Message:
    """The message of `data`."""
    return pickle.loads(data)


def make_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Describe a call of `function`. Raises TypeError when a worker could not import it by name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or module == "__main__" or "<" in name:
        raise TypeError(
            f"a worker cannot import {function!r}: expected a function at the top of a test module"
        )
    if _find(sys.modules.get(module), name) is not function:
        raise TypeError(
            f"{module}.{name} is not {function!r} but something else; a worker imports a function by that "
            "name, so move it to the top of its module and leave decorators off"
        )
    return Call(module, name, args, kwargs, tuple(sys.path))


def resolve(call: Call) -> Callable[..., Any]:
    """In a worker: import the function that `call` names."""
    sys.path.extend(entry for entry in call.path if entry not in sys.path)
    return _find(importlib.import_module(call.module), call.name)


def import_module(name: str) -> None:
    """In a worker: import a test module."""
    importlib.import_module(name)


def _find(module: ModuleType | None, qualified_name: str) -> Any:
    found: Any = module
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    return found
