"""Batches made ready beforehand, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["prefetch"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Made(Generic[T]):
    """What the thread hands over; ``error`` where making it failed."""

    step: int
    value: T | None
    error: BaseException | None = None


@contextmanager
def prefetch(make: Callable[[int], T], start: int, stop: int, depth: int = 2) -> Iterator[Iterator[tuple[int, T]]]:
    """``(step, make(step))`` for ``start <= step < stop``, at most ``depth`` of them ahead of what was taken.

    What ``make`` raises is raised where its step is taken. On leaving, the thread has ended.

    Args:
        make: called in a thread, in order; with ``depth`` 0 it is called where its step is taken.
        start: the first step.
        stop: the step behind the last one.
        depth: how many to have ready.

    Example:
        >>> with prefetch(lambda step: step * step, 2, 5) as squares:
        ...     print(list(squares))
        [(2, 4), (3, 9), (4, 16)]
    """
    if depth == 0:
        yield ((step, make(step)) for step in range(start, stop))
        return
    ready: queue.Queue[_Made[T]] = queue.Queue(depth)
    left = threading.Event()
    thread = threading.Thread(target=_fill, args=(make, start, stop, ready, left), name="prefetch", daemon=True)
    thread.start()
    try:
        yield _take(ready, stop - start)
    finally:
        left.set()
        while not ready.empty():  # a thread that waits for room finds some, and then that we have left
            ready.get_nowait()
        thread.join()


def _fill(
    make: Callable[[int], T], start: int, stop: int, ready: queue.Queue[_Made[T]], left: threading.Event
) -> None:
    for step in range(start, stop):
        if left.is_set():
            return
        try:
            made = _Made(step, make(step))
        except BaseException as error:
            made = _Made[T](step, None, error)
        ready.put(made)
        if made.error is not None:
            return


def _take(ready: queue.Queue[_Made[T]], count: int) -> Iterator[tuple[int, T]]:
    for _ in range(count):
        made = ready.get()
        if made.error is not None:
            raise made.error
        yield made.step, made.value  # type: ignore[misc]
