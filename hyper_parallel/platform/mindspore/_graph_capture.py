"""What a compiler tells by its questions: whether one is at work, and has come across a DTensor.

MindSpore's compilers reach a tensor in many ways (arguments, globals, closures, attributes, members of containers) and
then ask it whether it is a named tuple. The answer can refuse nothing, as errors of the question are dropped; so it is
noted, and whoever started the compiler raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from mindspore import Tensor
from mindspore.graph import jit_context, jit_trace

from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["NOT_IN_GRAPHS", "asked", "compiled", "refuse_in_trace"]

_PACKAGE = __name__.split(".")[0]

_met: ContextVar[list[Any] | None] = ContextVar("met_by_compiler", default=None)
_refused: set[str] = set()  # what MindSpore keeps as compiled, and would not ask about again

NOT_IN_GRAPHS = "graph mode cannot dispatch operators on it; use PyNative mode, or pass to_local()"


def asked(x: Any) -> bool:
    """Whether a compiler is at work; it then has come across ``x``, a DTensor or a layer shared between ranks."""
    met = _met.get()
    if met is None:
        return False
    met.append(x)
    return True


def compiled(compile_: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``compile_(*args, **kwargs)``, which gives the name of what it has compiled.

    Raises:
        UnsupportedOperatorError: it has come across a DTensor, or a layer shared between ranks.
    """
    met: list[Any] = []
    token = _met.set(met)
    try:
        name = compile_(*args, **kwargs)
    except UnsupportedOperatorError:
        raise
    except Exception as error:
        if met:
            raise _error(met[0]) from error
        used = _ours_in(args[0] if args else None, str(error))
        if used:
            raise UnsupportedOperatorError(
                f"what is compiled uses {used} of hyper_parallel, which graph mode cannot compile: call it outside of "
                "the compiled function, or use PyNative mode"
            ) from error
        raise
    finally:
        _met.reset(token)
    if met:
        if isinstance(name, str):
            _refused.add(name)
        raise _error(met[0])
    if name in _refused:
        raise UnsupportedOperatorError(
            f"what is compiled uses a DTensor, or a layer shared between ranks: {NOT_IN_GRAPHS}"
        )
    return name


def _ours_in(compiled_one: Any, report: str) -> str:
    """Names of what a function, or a cell's construct, takes from this package; "" for nothing of it."""
    function: Any = getattr(compiled_one, "fn", None) or getattr(compiled_one, "construct", None)
    code = getattr(function, "__code__", None)
    names = []
    if code is not None:
        found = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
        owners = {name: _owner(found.get(name)) for name in (*code.co_names, *code.co_freevars)}
        names = sorted(name for name, owner in owners.items() if owner.split(".")[0] == _PACKAGE)
    return ", ".join(names) or ("a function" if f"{_PACKAGE}/" in report else "")


def _owner(x: Any) -> str:
    """The module that something comes from, or that it is."""
    named = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None)
    return named if isinstance(named, str) else ""


def _error(x: Any) -> UnsupportedOperatorError:
    shared = f"a layer shared between ranks ({type(x).__name__})"
    what = f"a DTensor of shape {x.shape}" if isinstance(x, Tensor) else shared
    return UnsupportedOperatorError(f"what is compiled uses {what}: {NOT_IN_GRAPHS}")


def refuse_in_trace(what: str) -> None:
    """Raise inside a function under ``jit(capture_mode="trace")``; the trace ends first, as MindSpore goes on with it.

    Raises:
        UnsupportedOperatorError: such a function runs, and is being recorded.
    """
    if jit_context._jit_context is None:
        return
    context = jit_trace._trace_jit_context
    phase = context.phase
    if phase:
        context.phase = ""
        jit_trace._set_compile_only(True)
        try:
            jit_trace._jit_trace_end(Tensor(0))
        except Exception:  # the graph is thrown away
            jit_context.set_jit_context(None)
            jit_trace._using_trace = False
        finally:
            jit_trace._set_compile_only(False)
            jit_trace._trace_compile_cache.discard(phase)
    else:
        jit_context.set_jit_context(None)
    raise UnsupportedOperatorError(f"{what} in a function under jit(capture_mode='trace'): {NOT_IN_GRAPHS}")
