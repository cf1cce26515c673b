"""The end of a process that has used gloo: its threads finish before the interpreter goes.

A thread of gloo lets go of a collective's tensors only after it has woken the caller, and for that it needs Python's
lock. If the program ends meanwhile, the interpreter stops the thread as soon as it asks for the lock, C++ takes that
for an error, and a process that has done all its work aborts ("terminate called without an active exception").
``destroy_process_group()`` prevents it only where nobody else holds the group, and meshes do.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

__all__ = ["wait_at_exit"]

_THREADS = Path("/proc/self/task")
_NAME = b"(pt_gloo_runloop)"
_PAUSE = 0.005
"""Seconds in which a thread that wants Python's lock gets it and is done."""
_LONGEST = 1.0


@cache
def wait_at_exit() -> None:
    """Let gloo's threads come to rest when the process ends, in about 10 ms; calls after the first add nothing."""
    atexit.register(_wait)


def _wait() -> None:
    """Return when gloo's threads have been found asleep twice in a row, or after a second.

    One that waits for another rank is asleep too: whoever leaves a collective unfinished does not hang here.
    """
    deadline, found = time.monotonic() + _LONGEST, 0
    while found < 2 and time.monotonic() < deadline:
        states = _states()
        if not states:
            return
        time.sleep(_PAUSE)  # lets go of Python's lock
        found = found + 1 if set(states) == {"S"} else 0


def _states() -> list[str]:
    """What the system says of each of gloo's threads: "S" asleep, "R" running. Other systems than Linux do not tell."""
    if not _THREADS.is_dir():
        return ["S"]
    states = []
    for thread in _THREADS.iterdir():
        try:
            _, name, after = (thread / "stat").read_bytes().partition(_NAME)  # a name may be cut within a character
        except OSError:  # it has ended meanwhile
            continue
        if name:
            states.append(after.split()[0].decode())
    return states
