"""The groups that are alive: started on first use, shared by all tests, few at a time."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from tests.harness.group import WorkerGroup
from tests.harness.platforms import check_platform, why_not_here

# A worker takes 300 to 500 MB.
_MOST_GROUPS = 3
_MOST_WORKERS = 16


class GroupPool:
    """Groups by (platform, world size); the least recently used make room for a new one."""

    def __init__(
        self,
        most_groups: int = _MOST_GROUPS,
        most_workers: int = _MOST_WORKERS,
        start: Callable[[str, int], WorkerGroup] = WorkerGroup,
    ) -> None:
        self._start = start
        self._most_groups = most_groups
        self._most_workers = most_workers
        self._groups: dict[tuple[str, int], WorkerGroup] = {}  # the least recently used first

    def get(self, platform: str, world_size: int) -> WorkerGroup:
        """The group, started when there is none or when it was closed."""
        check_platform(platform)
        key = (platform, world_size)
        group = self._groups.pop(key, None)
        if group is not None and not group.is_alive():
            group.close()
            group = None
        if group is None:
            self._make_room(world_size)
            group = self._start(platform, world_size)
        self._groups[key] = group
        return group

    def close(self) -> None:
        """Close every group."""
        while self._groups:
            self._groups.popitem()[1].close()

    def _make_room(self, workers: int) -> None:
        while self._groups and (
            len(self._groups) >= self._most_groups
            or sum(group.world_size for group in self._groups.values()) + workers > self._most_workers
        ):
            self._groups.pop(next(iter(self._groups))).close()


_pool = GroupPool()
atexit.register(_pool.close)
close_all = _pool.close


def workers(platform: str, world_size: int) -> WorkerGroup:
    """The shared group of `world_size` workers of `platform`; skips the test where that cannot run."""
    if reason := why_not_here(platform):
        import pytest  # here, because workers import this module as well

        pytest.skip(reason)
    return _pool.get(platform, world_size)


def run_distributed(
    function: Callable[..., Any],
    *args: Any,
    platform: str = "torch",
    world_size: int = 2,
    timeout: float = 20.0,
    expect_error: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on every rank of the shared group: `workers(...).run(...)`.

    Example: `run_distributed(total_of_ranks, platform="torch", world_size=4) == [6, 6, 6, 6]`.
    """
    group = workers(platform, world_size)
    return group.run(function, *args, timeout=timeout, expect_error=expect_error, **kwargs)
