"""Times of several candidates, taken in turn, so that what else the machine does hits all alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["Clock", "interleave"]


class Clock:
    """Durations between marks."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last mark."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def interleave(
    candidates: Mapping[str, Callable[[], dict[str, float]]], repetitions: int, barrier: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Per candidate the medians of what it returns; every round runs each candidate once.

    The order is another one in every round (the same on all ranks), so that nobody always follows the same neighbour,
    who may leave much memory to be cleared. Ranks wait for each other before each measurement.
    """
    names = list(candidates)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(repetitions):
        for name in order.sample(names, len(names)):
            gc.collect()
            barrier()
            taken[name].append(candidates[name]())
    return {
        name: {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
        for name, samples in taken.items()
    }
