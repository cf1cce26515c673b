"""Memory for large results, in huge pages where Linux has them.

The first touch of a page costs a fault, which for a large tensor takes as long as all arithmetic of the loss: with
pages of 2 MiB instead of 4 KiB there are 512 times fewer. PyTorch takes and returns large blocks of memory on CPU by
``mmap`` for each tensor anew, so the faults come with every step.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import lru_cache

import torch

__all__ = ["empty_like"]

_SMALLEST = 8 << 20
"""Bytes from which it is worth a system call: a few huge pages."""


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like``; large ones on CPU come in huge pages if the system has some to give."""
    out = torch.empty_like(x)
    size = out.untyped_storage().nbytes()
    if size >= _SMALLEST and type(out) is torch.Tensor and out.device.type == "cpu":
        advise = _advise()
        if advise is not None:
            start = -(-out.untyped_storage().data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = out.untyped_storage().data_ptr() + size
            advise(start, (stop - start) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return out


@lru_cache(None)
def _advise() -> Callable[[int, int, int], int] | None:
    """The system call, whose refusal changes nothing; None where there is none."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
