"""The bandwidth of a copy: with the bytes that must move, the time below which no implementation can be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["copy_bandwidth"]


def copy_bandwidth(like: torch.Tensor, barrier: Callable[[], None], repetitions: int = 5) -> float:
    """Bytes a second, read and written, of a copy of ``like`` into memory that is there, on all ranks at once."""
    out = torch.zeros_like(like)
    seconds = []
    for _ in range(repetitions + 1):
        barrier()
        start = time.thread_time()  # not what others took of this core meanwhile
        out.copy_(like)
        seconds.append(time.thread_time() - start)
    return 2 * like.numel() * like.element_size() / statistics.median(seconds[1:])
