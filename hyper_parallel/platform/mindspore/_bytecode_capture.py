"""``@jit(capture_mode="bytecode")``: its graphs take a DTensor for the local tensor that it derives from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspore.graph._utils import pijit_context

from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["refuse_arguments"]


def refuse_arguments(base: type) -> None:
    """Make functions compiled so refuse arguments of class ``base``, also inside lists and dicts.

    What such a function captures is not looked at, nor what it makes itself.
    """
    ordinary = pijit_context.PreJit
    if getattr(ordinary, "_refuses", None) is base:
        return

    def checked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
