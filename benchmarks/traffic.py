"""Collectives of a call and the bytes each rank puts into them, seen where PyTorch dispatches them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TrafficMeter"]

_NOT_COLLECTIVES = ("wait", "wrap", "barrier")


class TrafficMeter(TorchDispatchMode):
    """Counts the collectives that run inside the context; backward on CPU runs in the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes_sent = 0
        """Payload this rank hands in: the input of a collective, whatever the algorithm sends."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what it does inside comes by here again
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and not name.startswith(_NOT_COLLECTIVES):
            self.calls[name.strip("_")] += 1
            sent = args[1] if "allgather" in name.replace("_", "") and space == "c10d" else args[0]
            self.bytes_sent += _size(sent)
        return func(*args, **(kwargs or {}))


def _size(x: Any) -> int:
    if isinstance(x, torch.Tensor):
        return x.numel() * x.element_size()
    return sum(_size(item) for item in x) if isinstance(x, (list, tuple)) else 0
