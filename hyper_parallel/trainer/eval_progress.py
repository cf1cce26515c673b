"""How far an evaluation is."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

__all__ = ["EvalProgress"]

_SECONDS = 10.0


class EvalProgress:
    """A progress bar with the time left on a terminal; elsewhere a line every ten seconds.

    Args:
        batches: how many there will be.
    """

    def __init__(self, batches: int) -> None:
        # disable=None: no bar where nobody would see it move
        self._bar = tqdm(total=batches, desc="eval", unit="batch", disable=None, dynamic_ncols=True)
        self._batches, self._done = batches, 0
        self._began = self._said = time.monotonic()

    def step(self) -> None:
        """A batch is done."""
        self._done += 1
        self._bar.update()
        now = time.monotonic()
        if self._bar.disable and now - self._said >= _SECONDS:
            self._said = now
            left = (now - self._began) / self._done * (self._batches - self._done)
            print(f"{self._done:,} of {self._batches:,} batches, {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        """The bar ends."""
        self._bar.close()
