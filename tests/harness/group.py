"""A group of worker processes that runs functions on all its ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness.backends import all_ranks_meet
from tests.harness.errors import DistributedError, GroupStartError, RankDied, RankError, RankTimeout
from tests.harness.launch import Process, kill_all, start_ranks
from tests.harness.protocol import (
    Failure,
    Message,
    Raised,
    Ready,
    Success,
    decode,
    encode,
    import_module,
    make_call,
)
from tests.harness.report import Outcome, describe, ranks_where

_START_SECONDS = 180.0
_GRACE_SECONDS = 2.0  # once a rank has failed the others get this long: they may wait for it in a collective
_POLL_SECONDS = 0.25
_CHECK_SECONDS = 10.0
_STACK_SECONDS = 0.5


class WorkerGroup:
    """`world_size` processes that form one process group of `platform`.

    Any failure closes the group: what its ranks left half done would reach into the next call.
    """

    def __init__(self, platform: str, world_size: int) -> None:
        """Start the processes and wait for them. Raises GroupStartError naming the ranks that failed."""
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, expected 1 or more")
        self.platform = platform
        self.world_size = world_size
        self._imported: set[str] = set()
        self._directory = Path(tempfile.mkdtemp(prefix=f"harness-{platform}-{world_size}-"))
        self._ranks: list[Process] = []
        self._helpers: list[Process] = []
        try:
            self._ranks, self._helpers = start_ranks(platform, world_size, self._directory)
            outcomes, waited = self._collect(_START_SECONDS, Ready)
            self._judge(outcomes, "starting", waited, Ready)
        except DistributedError as error:
            self.close()
            raise GroupStartError(str(error), error.ranks) from None
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [process.popen.pid for process in self._ranks]

    def is_alive(self) -> bool:
        """Whether the group can run another call."""
        return bool(self._ranks) and all(p.is_running() for p in [*self._ranks, *self._helpers])

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 20.0,
        expect_error: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank; return the value of each rank, by rank.

        `function` stands at the top of an importable module; its values are NumPy arrays or plain Python.
        With `expect_error` every rank must raise; the result is a `Raised(type, message)` for each, and the
        group lives on.

        Raises RankError (a rank raised, or failed to), RankTimeout (no answer within `timeout` seconds) or
        RankDied, all naming the ranks; the group is closed then.
        """
        if not self._ranks:
            raise RuntimeError(f"the {self.platform} group of {self.world_size} is closed")
        call = make_call(function, args, kwargs)
        data = encode(call)  # before any rank gets to work: what cannot be pickled harms nobody
        wanted: type[Message] = Failure if expect_error else Success
        try:
            self._import(call.module)
            outcomes = self._call(data, f"running {call}", timeout, wanted)
            in_step = not expect_error or self._is_in_step()
        except BaseException:  # an interrupt, too, leaves ranks in the middle of something
            self.close()
            raise
        if not in_step:
            self.close()
        return [_result(outcome) for outcome in outcomes]

    def close(self) -> None:
        """End every process of the group, and no other. Harmless when repeated."""
        kill_all([*self._ranks, *self._helpers])
        self._ranks, self._helpers = [], []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _import(self, module: str) -> None:
        """Import a test module ahead of its first function; on a busy machine that can take long."""
        if module not in self._imported:
            data = encode(make_call(import_module, (module,), {}))
            self._call(data, f"importing {module}", _START_SECONDS, Success)
            self._imported.add(module)

    def _is_in_step(self) -> bool:
        """After expected errors: whether a collective still works; if not, they came at different points."""
        data = encode(make_call(all_ranks_meet, (), {}))
        try:
            outcomes = self._call(data, "checking the group", _CHECK_SECONDS, Success)
        except DistributedError:
            return False
        return all(outcome.answer == Success(True) for outcome in outcomes)

    def _call(self, data: bytes, doing: str, timeout: float, wanted: type[Message]) -> list[Outcome]:
        for process in [*self._ranks, *self._helpers]:
            process.log.mark()
        for process in self._ranks:
            with contextlib.suppress(
                OSError
            ):  # a dead worker is found, and named, when its answer is awaited
                process.connection.send_bytes(data)
        outcomes, waited = self._collect(timeout, wanted)
        self._judge(outcomes, doing, waited, wanted)
        return outcomes

    def _collect(self, timeout: float, wanted: type[Message]) -> tuple[list[Outcome], str]:
        """Wait for a message of each rank. Once the call has failed the rest get a short grace, no more.

        Returns the outcomes, and in words how long was waited.
        """
        outcomes = [Outcome(rank, process) for rank, process in enumerate(self._ranks)]
        pending: dict[Connection, Outcome] = {o.process.connection: o for o in outcomes}
        waited = f"within {timeout:g} s"
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending), min(left, _POLL_SECONDS))
            failed = any(not helper.is_running() for helper in self._helpers)
            for connection, outcome in list(pending.items()):
                if connection in ready:
                    outcome.answer = _receive(connection)
                elif outcome.process.is_running():
                    continue
                # Without an answer here the process is gone, even where a child of it keeps the socket open.
                outcome.died = outcome.answer is None
                failed |= outcome.died or (wanted is not Failure and not isinstance(outcome.answer, wanted))
                del pending[connection]
            if failed and deadline > (cut := time.monotonic() + _GRACE_SECONDS):
                deadline, waited = cut, f"within {_GRACE_SECONDS:g} s after that"
        self._ask_for_stacks(list(pending.values()))
        return outcomes, waited

    def _ask_for_stacks(self, silent: list[Outcome]) -> None:
        """Have ranks that do not answer print where they are, which works in the middle of a collective."""
        for outcome in silent:
            if outcome.process.is_running():
                os.kill(outcome.process.popen.pid, signal.SIGUSR1)
        if silent:
            time.sleep(_STACK_SECONDS)

    def _judge(self, outcomes: list[Outcome], doing: str, waited: str, wanted: type[Message]) -> None:
        """Raise for the first cause: a dead rank makes others fail, a failed one makes others wait."""
        died = ranks_where(outcomes, lambda o: o.died)
        wrong = ranks_where(outcomes, lambda o: o.answer is not None and not isinstance(o.answer, wanted))
        silent = ranks_where(outcomes, lambda o: o.silent)
        for ranks, error in ((died, RankDied), (wrong, RankError), (silent, RankTimeout)):
            if ranks:
                what = f"{self.platform} group of {self.world_size}, {doing}"
                raise error(describe(outcomes, self._helpers, what, waited, wanted), ranks)


def _receive(connection: Connection) -> Message | None:
    try:
        return decode(connection.recv_bytes())
    except (EOFError, OSError):
        return None


def _result(outcome: Outcome) -> Any:
    if isinstance(outcome.answer, Failure):
        return Raised(outcome.answer.type, outcome.answer.message)
    assert isinstance(outcome.answer, Success)
    return outcome.answer.value
