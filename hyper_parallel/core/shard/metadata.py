"""Operators that are answered from the layout, or with a value on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform import get_platform

__all__ = ["METADATA_OPS", "VALUE_OPS", "host_value"]


def _size(x: Any, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]  # in the framework's own type


def _ndim(x: Any) -> int:
    layout: Layout = x._layout
    return layout.ndim


def _numel(x: Any) -> int:
    layout: Layout = x._layout
    return prod(layout.shape)


METADATA_OPS: dict[str, Callable[..., Any]] = {
    "size": _size,
    "dim": _ndim,
    "ndim": _ndim,
    "ndimension": _ndim,
    "numel": _numel,
    "nelement": _numel,
}
"""Answered with global numbers."""

VALUE_OPS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__format__",
     "__complex__", "is_nonzero", "asnumpy"}
)
"""Give a value on the host: the global one. A Partial is reduced first (collective); a shard is refused."""


_ARRAY_OPS = frozenset({"numpy", "__array__", "asnumpy"})


def host_value(op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a value operator on the global value.

    Raises:
        UnsupportedOperatorError: the tensor is sharded, so that no rank has the value.
    """
    x = args[0]
    layout: Layout = x._layout
    platform = get_platform()
    name = platform.get_op_name(op_call)
    if name == "__format__" and layout.shape:  # text, as str() gives it
        return object.__format__(x, *args[1:])
    if any(p.is_shard() for p in layout.placements) and prod(layout.shape) != 1:
        raise UnsupportedOperatorError(
            f"{name}: no rank holds the values of {layout.describe()}; use full_tensor() (collective) or to_local()"
        )
    if name not in _ARRAY_OPS:  # a number has no gradient; an array of a tensor with one is the framework's to refuse
        x = platform.as_dtensor(type(x), platform.detach(platform.as_local(x)), layout)
    return op_call(x.full_tensor(), *args[1:], **kwargs)
