"""Peak memory of a call as the kernel of the operating system saw it.

Linux keeps the highest resident size of a process (VmHWM) and resets it on request (5 into clear_refs). So nothing is
sampled and nothing is missed: what allocators, libraries and collectives touched is in it. Memory that was free in
the heap before the call would not show; ``malloc_trim`` gives it back first.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak_extra_bytes"]

_SELF = Path("/proc/self")


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """How much more memory was resident at the highest point of ``call()`` than before it; None where unknown."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (_SELF / "clear_refs").write_text("5")
        before = _status("VmRSS")
    except (OSError, AttributeError):
        call()
        return None
    kept = call()
    peak = _status("VmHWM")
    del kept
    return max(0, peak - before)


def _status(field: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")
