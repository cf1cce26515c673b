"""No process of the harness outlives the test run, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere only a closed socket tells).

    A rank that waits in a collective cannot notice by itself that its parent was killed.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = int(os.environ["HARNESS_PARENT"])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
