"""What a distributed call raises in the parent. Every message names the ranks at fault."""

from __future__ import annotations


class DistributedError(RuntimeError):
    """A distributed call failed, `ranks` are at fault; the group is closed, the next call gets a new one."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankError(DistributedError):
    """A rank raised (or, where every rank should raise, did not)."""


class RankTimeout(DistributedError):
    """A rank did not answer in time."""


class RankDied(DistributedError):
    """A rank's process ended in the middle of a call."""


class GroupStartError(DistributedError):
    """A group of workers could not be started."""
