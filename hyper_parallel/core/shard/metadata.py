"""Operators that are answered from the layout, or with a value on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform import get_platform

__all__ = ["METADATA_OPS", "VALUE_OPS", "host_value"]


def _size(layout: Layout, dim: int | None = None) -> Any:
    return layout.shape if dim is None else layout.shape[dim]


def _numel(layout: Layout) -> int:
    count = 1
    for s in layout.shape:
        count *= s
    return count


METADATA_OPS: dict[str, Callable[..., Any]] = {
    "size": _size,
    "dim": lambda layout: layout.ndim,
    "ndim": lambda layout: layout.ndim,
    "ndimension": lambda layout: layout.ndim,
    "numel": _numel,
    "nelement": _numel,
}
"""Answered with global numbers."""

VALUE_OPS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__format__",
     "__complex__", "is_nonzero", "asnumpy"}
)
"""Give a value on the host: the global one. A Partial is reduced first (collective); a shard is refused."""


def host_value(op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a value operator on the global value.

    Raises:
        UnsupportedOperatorError: the tensor is sharded, so that no rank has the value.
    """
    x = args[0]
    layout: Layout = x._layout
    if any(p.is_shard() for p in layout.placements) and _numel(layout) != 1:
        name = get_platform().get_op_name(op_call)
        raise UnsupportedOperatorError(
            f"{name}: no rank holds the values of {layout.describe()}; use full_tensor() (collective) or to_local()"
        )
    return op_call(x.full_tensor(), *args[1:], **kwargs)
