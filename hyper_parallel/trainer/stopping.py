"""Stopping in step: a signal to any rank ends the run on all of them after the same step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform

__all__ = ["StopRequest"]


class StopRequest:
    """Whether this process was asked to stop, by SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Inside it the first signal only leaves a note; a second one acts as before. Main thread only."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: FrameType | None) -> None:
            self.requested = True
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, note)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, mesh: DeviceMesh) -> bool:
        """Whether any rank of the mesh was asked, on all of them alike. One tiny all-reduce per mesh dim."""
        if mesh.size() == 1:
            return self.requested
        platform = get_platform()
        flag = platform.from_numpy(np.array([float(self.requested)], np.float32))
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                flag = platform.all_reduce(flag, "max", mesh.get_group(dim))
        return bool(platform.to_numpy(flag)[0])
