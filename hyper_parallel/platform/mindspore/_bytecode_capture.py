"""``@jit(capture_mode="bytecode")``: what meets a DTensor, or a layer shared between ranks, runs as Python.

MindSpore makes graphs from bytecode while the function runs. A value that it cannot turn into a graph's input splits
the graph there, and Python computes what hangs on it. ``TensorBase`` says so of itself (``dtensor.py``), and rules
around a layer run with capture switched off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import mindspore
from mindspore import _c_expression
from mindspore.graph._utils import pijit_context

from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["pause_capture", "refuse_arguments", "resume_capture", "uncaptured"]

_KNOWN = "2.10."
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Pausing returns whether capture was on. As no graph has these C functions, their callers are not put into one, either.
pause_capture = getattr(_c_expression, "jit_mode_pi_disable", lambda: False)
resume_capture = getattr(_c_expression, "jit_mode_pi_enable", lambda: False)


def uncaptured(function: _Function) -> _Function:
    """``function`` with capture switched off while it runs."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        captured = pause_capture()
        try:
            return function(*args, **kwargs)
        finally:
            if captured:
                resume_capture()

    return cast(_Function, wrapper)


def refuse_arguments(base: type, version: str = mindspore.__version__) -> None:
    """Make functions compiled so refuse arguments of class ``base``, also inside lists and dicts.

    MindSpore would split their graphs, too, but makes broken code of a list that cannot be an input. Of a MindSpore
    that may ask other questions than the one we know, all calls of such functions are refused.
    """
    ordinary = pijit_context.PreJit
    if getattr(ordinary, "_refuses", None) is base:
        return
    known = version.startswith(_KNOWN)

    def checked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not known:
            raise UnsupportedOperatorError(
                f"a function under jit(capture_mode='bytecode') runs beside hyper_parallel on MindSpore {version}; "
                f"expected MindSpore {_KNOWN}x, where a DTensor in it is seen; leave it uncompiled"
            )
        for x in _leaves((args, kwargs)):
            if isinstance(x, base):
                raise UnsupportedOperatorError(
                    f"a function under jit(capture_mode='bytecode') got a DTensor of shape {x.shape}: graph mode "  # type: ignore[attr-defined]
                    "cannot dispatch operators on it; use PyNative mode, or pass to_local()"
                )
        return ordinary(args, kwargs)

    checked._refuses = base  # type: ignore[attr-defined]
    pijit_context.PreJit = checked


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for x in value:
            yield from _leaves(x)
    else:
        yield value
