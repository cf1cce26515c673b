"""Tensors without memory that say so when somebody computes with them.

MindSpore computes with what happens to be there, or ends the process. A class of their own costs nothing where there
are values: MindSpore asks a tensor's class for ``__fallback__`` anyway, and a tensor that gets values loses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from mindspore import Parameter, Tensor
from mindspore._c_expression import NoFallbackGuard

from hyper_parallel.platform.modules import without_values

__all__ = ["mark"]

_NAME = "_name_of_parameter"
_CASTS = frozenset({"ToDevice"})
"""What ``Cell.to`` runs: it knows tensors without memory, and models are cast before they have values, too."""


def mark(tensor: Tensor) -> None:
    """Refuse computation with a tensor if it has no memory, else allow it."""
    kind: type = type(tensor)
    unset = issubclass(kind, _Unset)
    if tensor.is_meta and not unset:
        tensor.__class__ = _unset_class(kind)
    elif unset and not tensor.is_meta:
        tensor.__class__ = kind.__bases__[1]


def _refuse_if_unset(tensor: Any) -> None:
    mark(tensor)  # it may have got values by a way of MindSpore's own
    if tensor.is_meta:
        name = tensor.name if isinstance(tensor, Parameter) else tensor.__dict__.get(_NAME, "a parameter")
        raise RuntimeError(without_values(name, tuple(tensor.shape)))


def _checked(name: str) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_if_unset(self)
        return getattr(self, name)(*args, **kwargs)

    return method


class _Unset:
    """Mixed in before the tensor's own class."""

    __slots__ = ()

    def __fallback__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.name in _CASTS:
            with NoFallbackGuard():
                result = func(*args, **(kwargs or {}))
            if result is not self and result.is_meta:
                mark(result)
                result.__dict__[_NAME] = getattr(self, "name", None) or self.__dict__.get(_NAME)
            return result
        for x in _leaves(args):
            if isinstance(x, _Unset):
                _refuse_if_unset(x)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        mark(copied)
        return copied

    # what MindSpore answers without asking __fallback__, or asks the other operand about
    asnumpy, __getitem__ = _checked("asnumpy"), _checked("__getitem__")
    __radd__, __rsub__, __rmul__, __rtruediv__ = map(_checked, ("__radd__", "__rsub__", "__rmul__", "__rtruediv__"))
    __rmatmul__, __rpow__ = _checked("__rmatmul__"), _checked("__rpow__")


@cache
def _unset_class(cls: type) -> type:
    return type(cls.__name__, (_Unset, cls), {"__module__": cls.__module__, "__slots__": ()})


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value
