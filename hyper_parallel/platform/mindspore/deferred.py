"""Parameters that have a shape and no values yet, and models made of them.

Such a parameter is on MindSpore's meta device. Whole models are not built there: what their constructors compute beside
parameters (rotary tables, masks) would lose its values, so here the parameters alone are without memory. How they
would have been drawn is kept with them, in terms of the whole parameter. Computing with one is an error (``_unset``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import getweakrefcount

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from hyper_parallel.platform.mindspore import _host, _unset
from hyper_parallel.platform.mindspore.init_recorder import describe_initializer
from hyper_parallel.platform.weights import Draw

__all__ = ["DRAW", "deferred_parameter", "deferred_parameters", "is_deferred", "is_deferring", "replace_value"]

DRAW = "_first_values"
"""The attribute of a deferred parameter that says how it is drawn: a :class:`Draw`, or in words why nobody knows."""

_SHORT_FLOATS = ("float32", "float16", "bfloat16")

_Drawn = dict[tuple[int, ...], Draw | str]
"""How tensors were drawn while a model was constructed, by their shape."""


def is_deferred(parameter: Tensor) -> bool:
    """Whether it has a shape and no memory."""
    return bool(parameter.is_meta)


def is_deferring() -> bool:
    """Whether :func:`deferred_parameters` is active in this thread or task."""
    return _building.get() is not None


def deferred_parameter(shape: Sequence[int], dtype: Any, name: str | None = None) -> Parameter:
    """A parameter without memory.

    Example:
        >>> deferred_parameter((1 << 20, 1 << 20), mindspore.float32).shape                      # doctest: +SKIP
        (1048576, 1048576)
    """
    parameter = Parameter(_without_memory(shape, dtype), name=name)
    _unset.mark(parameter)
    return parameter


def replace_value(parameter: Parameter, value: Tensor | Sequence[int]) -> None:
    """Another tensor as what the parameter holds, of any shape and without a copy; it stays the same object.

    Args:
        parameter: with memory or without.
        value: of the parameter's dtype; or a shape: it has no memory then.
    """
    new = value if isinstance(value, Tensor) else _without_memory(value, parameter.dtype)
    if tuple(parameter.shape) != tuple(new.shape):
        _renew(parameter, new)
    parameter.init = None  # else MindSpore draws it again at the model's first call
    parameter.init_mode = None
    parameter.assign_value(new)
    parameter.param_info.parameter_shape = list(new.shape)
    _unset.mark(parameter)


def _renew(parameter: Parameter, like: Tensor) -> None:
    """All that is MindSpore's of the parameter made anew, for another shape.

    Else its node in graphs remembers the shape that it was created with, and a loss that does not depend on the
    parameter gives it zeros of that shape, which optimizers refuse. What somebody has a hook or a weak reference on
    stays as it is.
    """
    if parameter.hooks() or getweakrefcount(parameter):
        return
    kind = type(parameter)
    device = parameter._get_user_data("parameter_device")
    fresh = Parameter(_without_memory(like.shape, like.dtype), requires_grad=parameter.requires_grad, device=device)
    mindspore.swap_tensors(parameter, fresh)
    parameter.__class__ = kind
    parameter.__dict__, fresh.__dict__ = fresh.__dict__, parameter.__dict__
    parameter.param_info = parameter.param_info  # MindSpore's half of it was swapped, too


@contextmanager
def deferred_parameters() -> Iterator[None]:
    """Parameters created inside have no memory; in this thread or task only.

    That is: those with an initializer, and those that are one number everywhere. Others were given values of their own
    and keep them. A table that MindSpore draws while it constructs a layer (``Embedding`` with ``padding_idx``) takes
    memory until the parameter is made of it.
    """
    token = _building.set({})
    _route.enter()
    try:
        yield
    finally:
        _route.leave()
        _building.reset(token)


_building: ContextVar[_Drawn | None] = ContextVar("deferred_parameters", default=None)


class _Route:
    """Leads the creation of parameters through here while somebody defers.

    Not longer than that: MindSpore looks at reference counts to see whether it has to copy what it is given, and the
    detour adds one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ordinary_new = Parameter.__new__
        self._ordinary_init_data = Tensor.init_data

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._ordinary_new, self._ordinary_init_data = Parameter.__new__, Tensor.init_data
                new, init_data = self._ordinary_new, self._ordinary_init_data

                def routed_new(cls: type, default_input: Any, *args: Any, **kwargs: Any) -> Any:
                    drawn = _building.get()
                    if drawn is None:
                        return new(cls, default_input, *args, **kwargs)
                    return _new(new, drawn, cls, default_input, *args, **kwargs)

                def routed_init_data(self: Tensor, *args: Any, **kwargs: Any) -> Any:
                    drawn = _building.get()
                    if drawn is not None and self.init is not None:
                        drawn[tuple(self.shape)] = describe_initializer(self.init, tuple(self.shape))
                    return init_data(self, *args, **kwargs)

                Parameter.__new__, Tensor.init_data = routed_new, routed_init_data

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                Parameter.__new__, Tensor.init_data = self._ordinary_new, self._ordinary_init_data


_route = _Route()


def _new(new: Any, drawn: _Drawn, cls: type, default_input: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(default_input, Parameter):
        draw = getattr(default_input, DRAW, None)
    elif type(default_input) is Tensor:
        draw = _draw_of(default_input, drawn)
    else:
        draw = None
    if draw is not None and not default_input.is_meta:
        default_input = _without_memory(default_input.shape, default_input.dtype)
    parameter = new(cls, default_input, *args, **kwargs)
    if draw is not None:
        setattr(parameter, DRAW, draw)
        _unset.mark(parameter)
    return parameter


def _draw_of(tensor: Tensor, drawn: _Drawn) -> Draw | str | None:
    """None for values of its own."""
    if tensor.init is not None:
        return describe_initializer(tensor.init, tuple(tensor.shape))
    if tensor.is_meta or str(tensor.dtype).lower() not in _SHORT_FLOATS or not tensor.size:
        return None
    values = _host.as_float32(_host.to_host(tensor))
    first = values.reshape(-1)[0]
    if (values == first).all():
        return Draw("constant", (float(first),))
    found = drawn.get(tuple(tensor.shape))
    if isinstance(found, Draw) and values.ndim > 1:
        rows = np.flatnonzero(~values.reshape(len(values), -1).any(1))
        return Draw(found.kind, found.numbers, tuple(int(r) for r in rows))
    return found


def _without_memory(shape: Sequence[int], dtype: Any) -> Tensor:
    return Tensor(shape=tuple(shape), dtype=dtype, device="meta")
