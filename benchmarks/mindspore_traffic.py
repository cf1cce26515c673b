"""Collectives of a call on MindSpore and the bytes each rank puts into them, seen where the library calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hyper_parallel.platform.mindspore import collectives

__all__ = ["Traffic", "count_traffic"]

_NAMES = ("all_reduce", "all_gather", "all_gather_uneven")


class Traffic:
    """What ran while it was counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes_sent = 0
        """Payload this rank hands in: the input of a collective, whatever is sent in its place on CPU."""


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the collectives that run inside it."""
    seen = Traffic()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, *args: Any) -> Any:
            seen.calls[name] += 1
            seen.bytes_sent += x.nbytes
            return function(x, *args)

        return run

    with mock.patch.multiple(collectives, **{name: counted(name, getattr(collectives, name)) for name in _NAMES}):
        yield seen
