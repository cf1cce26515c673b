"""Letting a function of the framework ask us first, wherever references to it have gone.

Replacing a module's attribute does not reach what was imported by name before. So the function keeps its identity and
gets a new body, which calls a handler with the original one. Callers, ``inspect`` and MindSpore's compiler (which reads
source code) go on seeing the original's signature and source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

__all__ = ["Handler", "route"]

Handler = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""Receives the original function and the call's arguments."""

_PREFIX = "_hyper_parallel_handler_of_"
_lock = threading.Lock()


def _body(*args, **kwargs):  # type: ignore[no-untyped-def]
    return _handler_(args, kwargs)  # type: ignore[name-defined]  # noqa: F821 - renamed for each function


def route(function: FunctionType, handler: Handler) -> None:
    """Give ``function`` a body that calls ``handler(original, args, kwargs)``; does nothing the second time.

    The handler stands in the globals of the function's own module, so that a call costs no look-up elsewhere.
    """
    name = _PREFIX + function.__qualname__.replace(".", "_")
    with _lock:
        if name in function.__globals__:
            return
        code = function.__code__
        original = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        original.__annotations__ = dict(function.__annotations__)
        original.__qualname__ = function.__qualname__
        original.__module__ = function.__module__
        original.__doc__ = function.__doc__
        function.__globals__[name] = lambda args, kwargs: handler(original, args, kwargs)
        function.__wrapped__ = original  # type: ignore[attr-defined]
        function.__code__ = _body.__code__.replace(
            co_names=(name,), co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
        )
