"""Memory for large results, in huge pages where Linux has them.

The first touch of a page costs a fault, which for a large tensor takes as long as all arithmetic of the loss: with
pages of 2 MiB instead of 4 KiB there are 512 times fewer. PyTorch takes and returns large blocks of memory on CPU by
``mmap`` for each tensor anew, so the faults come with every step.

Huge pages are asked for only where plenty of them are free. In fragmented memory the system would move pages about
until there are some, which takes several times as long as the faults that it saves. And not in a virtual machine that
tells its host of large free blocks: the host takes that memory away within seconds, and to get it back at the first
touch costs even more.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["empty_like", "free_huge_pages", "reports_free_pages"]

_SMALLEST = 8 << 20
"""Bytes from which it is worth a system call: a few huge pages."""

_PLENTY = 4
"""How many times what is wanted has to be free: the other ranks of this machine want as much."""

_FREE_BLOCKS = Path("/proc/buddyinfo")
_VIRTIO = Path("/sys/bus/virtio/devices")
_BALLOON, _REPORTS_FREE_PAGES = 5, 5  # a kind of device, and one of its features (virtio 1.2, 5.5)
_HUGE_ORDER = ((2 << 20) // mmap.PAGESIZE).bit_length() - 1


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like``; large ones on CPU come in huge pages if the system has some to give."""
    out = torch.empty_like(x)
    size = out.untyped_storage().nbytes()
    if size >= _SMALLEST and type(out) is torch.Tensor and out.device.type == "cpu":
        advise = _advise()
        if advise is not None and not reports_free_pages() and free_huge_pages() >= _PLENTY * size:
            start = -(-out.untyped_storage().data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = out.untyped_storage().data_ptr() + size
            advise(start, (stop - start) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return out


def free_huge_pages() -> int:
    """Free bytes in blocks of at least 2 MiB; 0 where the system does not tell."""
    try:
        zones = _FREE_BLOCKS.read_text().splitlines()
        # "Node 0, zone Normal", then how many blocks of 1, 2, 4, ... pages are free
        blocks = [[int(count) for count in zone.split()[4:]] for zone in zones]
    except (OSError, ValueError):
        return 0
    pages = sum(count << order for zone in blocks for order, count in enumerate(zone) if order >= _HUGE_ORDER)
    return pages * mmap.PAGESIZE


@lru_cache(None)
def reports_free_pages() -> bool:
    """Whether this is a virtual machine whose free memory goes back to its host."""
    for device in _VIRTIO.glob("*"):
        try:
            kind = int((device / "device").read_text(), 16)
            features = (device / "features").read_text()
        except (OSError, ValueError):
            continue
        if kind == _BALLOON and features[_REPORTS_FREE_PAGES : _REPORTS_FREE_PAGES + 1] == "1":
            return True
    return False


@lru_cache(None)
def _advise() -> Callable[[int, int, int], int] | None:
    """The system call, whose refusal changes nothing; None where there is none."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
