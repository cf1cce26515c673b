"""One gather, and one sum of gradients, for layers side by side that take the same input: query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import get_module_backend
from hyper_parallel.platform.platform import Tensor

__all__ = ["SharedInput"]


@dataclass
class _Entry:
    given: Any
    stamp: Any
    made: Tensor
    uses: int


class SharedInput:
    """What was made of an input for the first of ``consumers`` layers, kept for the others and then let go.

    A layer that gets another tensor than the layer before it, or the same one changed, has its own made.
    """

    def __init__(self, consumers: int) -> None:
        self._consumers = consumers
        self._entry: _Entry | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return SharedInput(self._consumers)

    def take(self, x: Any, key: Any, make: Callable[[Any], Tensor]) -> Tensor:
        """``make(x)``; ``key`` says what else it depends on."""
        changes = get_module_backend().change_count(x)
        if changes is None:
            return make(x)
        stamp = (key, changes, get_platform().requires_grad(x))
        entry = self._entry
        if entry is None or entry.given is not x or entry.stamp != stamp:
            entry = self._entry = _Entry(x, stamp, self._until_backward(make(x)), 0)
        entry.uses += 1
        if entry.uses >= self._consumers:
            self._entry = None
        return entry.made

    def _until_backward(self, made: Tensor) -> Tensor:
        """Let go of ``made`` once backward has passed through its graph, also where layers are left that did not ask
        for it: the next forward pass, of the same tensor, has to make its own.
        """

        def let_go(grad: Tensor) -> Tensor:
            self._entry = None
            return grad

        return get_platform().linear_map(made, lambda value: value, let_go)
