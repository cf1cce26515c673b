"""MindSpore's operators by name: those of its primitives, which is what reaches the dispatcher.

A user's call arrives in one of four shapes: an ``OpCall`` with all arguments of the primitive, a ``TensorOverloadCall``
(a method of Tensor) with the arguments as they were passed, an older primitive whose arguments are packed behind the
primitive itself, or a :class:`NamedCall`, for what MindSpore does not lead to ``__fallback__`` by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspore import ops
from mindspore._c_expression import NoFallbackGuard
from mindspore.ops import Primitive

from hyper_parallel.platform.mindspore import _cpu_kernels, random

__all__ = ["LOCAL_OP_NAMES", "LOSS_OP_NAMES", "NamedCall", "get_op_name", "unpack"]

_SAME = {
    "Size": "numel",
    "Tile": "tile",
    "cross_entropy_ext": "cross_entropy",
    "log_softmax_ext": "log_softmax",
    "nll_loss_ext": "nll_loss",
}

LOSS_OP_NAMES = {
    "cross_entropy": "cross_entropy",
    "nll_loss": "nll_loss",
    "log_softmax": "log_softmax",
    "LogSoftmax": "log_softmax",
    "LogSoftmaxExt": "log_softmax",
}
"""Operators that loss parallel takes over, and what each means. ``ops.cross_entropy``, the function of ``mint`` and the
cells over both reach the dispatcher as one function, ``nll_loss`` likewise (see :mod:`.interop`); ``log_softmax`` as
the primitive that it is. The primitive NLLLoss, which gives a pair, is not taken over: called directly it is
refused."""

LOCAL_OP_NAMES = frozenset({"typeof"})
"""Questions that the local tensor answers as it is."""

_ATTRIBUTES = {
    "Stack": ("axis",),
    "Unstack": ("axis", "num"),
    "Sort": ("axis", "descending"),
    "TopK": ("sorted",),
    "Tril": ("diagonal",),
    "Triu": ("diagonal",),
}
"""Attributes of older primitives that say where they act; :func:`unpack` puts them behind the arguments."""

_MOVED = {"Tril": ops.Tril, "Triu": ops.Triu}
"""Those of which a rank's part may need another attribute, and how such a primitive is made."""


_SEED_AND_OFFSET_LAST = frozenset({"FuncDropoutExt", "DropoutExt"})
"""Random operators that come with numbers drawn before the dispatcher was asked; they draw anew, see :mod:`.random`."""


class NamedCall:
    """An operator as the dispatcher gets it: its name, and how to run it on local tensors."""

    __slots__ = ("_function", "name")

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with NoFallbackGuard():  # a DTensor deep inside an argument would lead to the dispatcher again, for ever
            return _cpu_kernels.call(self.name, self._function, args, kwargs)


class PackedPrimitive(NamedCall):
    """An older primitive: called with its inputs, and the attributes that :func:`unpack` has put behind them."""

    __slots__ = ("primitive",)

    def __init__(self, primitive: Any, run: Callable[..., Any]) -> None:
        name = primitive.name
        extra = len(_ATTRIBUTES.get(name, ()))

        def function(*args: Any) -> Any:
            inputs, attributes = args[: len(args) - extra], args[len(args) - extra :]
            moved = name in _MOVED and attributes != self.attributes()
            return run(_MOVED[name](*attributes) if moved else primitive, name, inputs)

        super().__init__(name, function)
        self.primitive = primitive

    def attributes(self) -> tuple[Any, ...]:
        """Values of the attributes that belong behind the arguments."""
        return tuple(getattr(self.primitive, a) for a in _ATTRIBUTES.get(self.name, ()))


def unpack(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """An operator and its own arguments, from what ``__fallback__`` receives."""
    name = func.name
    if len(args) == 3 and isinstance(args[0], Primitive) and args[1] == name and isinstance(args[2], tuple):
        if name == "Dropout":
            return NamedCall(name, random.older_dropout), args[2], {}
        packed = PackedPrimitive(args[0], func)
        return packed, (*args[2], *packed.attributes()), {}
    if name in _SEED_AND_OFFSET_LAST:
        return NamedCall(name, random.with_fresh_seed(func)), args, kwargs or {}
    return NamedCall(name, func), args, kwargs or {}


def get_op_name(op_call: Any) -> str:
    """The primitive's name, or that of a :class:`NamedCall`."""
    name: str = getattr(op_call, "name", None) or getattr(op_call, "__name__", None) or str(op_call)
    return _SAME.get(name, name)
