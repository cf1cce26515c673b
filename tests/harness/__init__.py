"""Run test functions in real process groups.

A test is an ordinary pytest item in the parent process. It names a function of a module, and every rank of a
group of worker processes runs it::

    from tests.harness import run_distributed, this_rank

    def double_of_rank(factor):  # runs in the workers
        return factor * this_rank()

    def test_double():  # runs in the parent
        assert run_distributed(double_of_rank, 2, platform="torch", world_size=3) == [0, 2, 4]

Groups are started on first use and kept for the tests that follow, so a call costs about a millisecond.
"""

from tests.harness.errors import DistributedError, GroupStartError, RankDied, RankError, RankTimeout
from tests.harness.group import WorkerGroup
from tests.harness.platforms import PLATFORMS, this_rank, this_world_size
from tests.harness.pool import GroupPool, close_all, run_distributed, workers
from tests.harness.protocol import Raised

__all__ = [
    "PLATFORMS",
    "DistributedError",
    "GroupPool",
    "GroupStartError",
    "RankDied",
    "RankError",
    "RankTimeout",
    "Raised",
    "WorkerGroup",
    "close_all",
    "run_distributed",
    "this_rank",
    "this_world_size",
    "workers",
]
