"""Start a job's local workers, watch them, and stop them all when one fails or somebody says so."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hyper_parallel.trainer.error_note import ErrorNote
from hyper_parallel.trainer.launch_environment import ProcessPlan, plan_processes, without_launcher
from hyper_parallel.trainer.worker import ERROR_FILE, LIFELINE, begun_file

__all__ = ["INTERRUPTED", "STOP_SECONDS", "JobFailed", "JobInterrupted", "run_job"]

_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 0.5
"""After the first failure, time in which the rank that caused it may still show."""

STOP_SECONDS = 10.0
"""Time that workers get to stop by themselves after Ctrl-C, when they have nothing to write."""

INTERRUPTED = 130
"""Exit status of a rank that stopped early because it was told to."""

_LOG_TAIL = 20


class JobFailed(RuntimeError):
    """A worker failed; the message names it and the cause, ``details`` has what it left behind."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class JobInterrupted(Exception):
    """The job was stopped by a signal; ``signal_number`` says which."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


@dataclass
class _Worker:
    plan: ProcessPlan
    process: subprocess.Popen[bytes]
    note: Path
    log: Path | None

    def status(self) -> int | None:
        """Exit status, or None while it runs; 1 when it has ended with 0 in the middle of its work."""
        status = self.process.poll()
        return 1 if status == 0 and begun_file(self.note).exists() else status


def run_job(
    command: Sequence[str], *, nproc: int, backend: str, log_folder: Path, stop_seconds: float = STOP_SECONDS
) -> None:
    """Run ``command`` in ``nproc`` local processes, each with its rank's environment, until all have ended.

    Rank 0 writes to this process's terminal; the others to ``log_folder/rankN.log``. Workers die with this
    process, however it ends.

    Raises:
        JobFailed: a worker ended with another status than 0, or had an error when it was told to stop; all others
            are gone by then.
        JobInterrupted: SIGINT or SIGTERM; workers were told to stop, and killed if they did not within
            ``stop_seconds``, or at a second signal.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    workers: list[_Worker] = []
    helpers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_") as notes, _signals_interrupt():
        lifeline, kept = os.pipe()
        try:
            with _free_port() as port:
                for plan in plan_processes(backend, nproc, port):
                    started = _start(command, plan, Path(notes), log_folder, lifeline)
                    (helpers if plan.rank is None else workers).append(started)
                _watch(workers, helpers)
        except JobInterrupted as stop:
            _stop_gently(workers, stop_seconds)
            if failed := _failed_while_stopping(workers):
                raise _explain(failed) from None
            raise stop from None
        finally:
            _kill([*workers, *helpers])
            os.close(lifeline)
            os.close(kept)


def _start(command: Sequence[str], plan: ProcessPlan, notes: Path, log_folder: Path, lifeline: int) -> _Worker:
    file_name = "scheduler" if plan.rank is None else f"rank{plan.rank}"
    note = notes / f"{file_name}.json"
    environment: Mapping[str, str] = {
        **without_launcher(dict(os.environ)),
        **plan.environment,
        ERROR_FILE: str(note),
        LIFELINE: str(lifeline),
    }
    log = None if plan.rank == 0 else log_folder / f"{file_name}.log"
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(open(log, "wb"))
        process = subprocess.Popen(
            list(command),
            env=environment,
            pass_fds=[lifeline],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which stops the workers in step
        )
    return _Worker(plan, process, note, log)


def _watch(workers: Sequence[_Worker], helpers: Sequence[_Worker]) -> None:
    """Return when all ranks have ended well; raise when one has not, or when what serves them has failed."""
    while True:
        statuses = [w.status() for w in workers]
        if any(statuses) or any(h.status() for h in helpers):
            _settle(workers)
            raise _explain(workers if any(w.status() for w in workers) else helpers)
        if None not in statuses:
            return
        time.sleep(_POLL_SECONDS)


def _settle(workers: Sequence[_Worker]) -> None:
    """Wait until the cause of a failure has shown; ranks that stop in step, as they do after a signal, get longer."""
    began = time.monotonic()
    while any(w.status() is None for w in workers):
        statuses = {w.status() for w in workers}
        stopping = INTERRUPTED in statuses and statuses <= {None, 0, INTERRUPTED}
        if time.monotonic() - began > (STOP_SECONDS if stopping else _SETTLE_SECONDS):
            return
        time.sleep(_POLL_SECONDS)


def _explain(workers: Sequence[_Worker]) -> JobFailed:
    """Who failed first, and of what.

    A rank that vanished without a note cannot be a consequence; else the oldest note is the cause: the other
    ranks learn of a failure only when its process has ended, after its note was written.
    """
    failed = [w for w in workers if w.status()]
    if all(w.status() == INTERRUPTED for w in failed):
        return JobFailed("stopped by a signal (SIGINT or SIGTERM) to one of its ranks", "")
    notes = {w.plan.rank: ErrorNote.read(w.note) for w in failed}

    def when(worker: _Worker) -> float:
        note = notes[worker.plan.rank]
        return 0.0 if note is None else note.time

    failed.sort(key=when)
    first = failed[0]
    note = notes[first.plan.rank]
    if note is not None:
        cause, details = f"{note.kind}: {note.message}", note.trace
    else:
        cause, details = _how_it_ended(first), _tail(first.log)
    later = []
    for worker in failed[1:]:
        other = notes[worker.plan.rank]
        if note is None or other is None or (other.kind, other.message) != (note.kind, note.message):
            later.append(f"afterwards {worker.plan.name}: {_one_line(other) or _how_it_ended(worker)}")
    details = "\n".join([details.rstrip(), *later]).lstrip()
    return JobFailed(f"{first.plan.name} failed: {cause}", details)


def _one_line(note: ErrorNote | None) -> str:
    return f"{note.kind}: {note.message.splitlines()[0] if note.message else ''}" if note else ""


def _how_it_ended(worker: _Worker) -> str:
    status = worker.process.returncode
    if status == 0:
        return "it ended with exit status 0 before its work was done"
    if status > 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name
    hint = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
    return f"it was killed by {name}{hint}"


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:]
    return "\n".join([f"end of {log}:", *lines]) if lines else ""


def _stop_gently(workers: Sequence[_Worker], seconds: float) -> None:
    """Tell all to stop after their step, and wait for it; another signal ends the wait, as does a rank that fails."""
    for worker in workers:
        if worker.status() is None:
            worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    with contextlib.suppress(JobInterrupted):
        while time.monotonic() < deadline and any(w.status() is None for w in workers):
            if any(w.status() not in (None, 0, INTERRUPTED) for w in workers):
                deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)  # the others wait for it in vain
            time.sleep(_POLL_SECONDS)


def _failed_while_stopping(workers: Sequence[_Worker]) -> list[_Worker]:
    """Those that could not do what was left to do. A rank that the signal ended at once takes others with it: then only
    those that somebody has killed.
    """
    statuses = [w.status() for w in workers]
    if -signal.SIGTERM in statuses:
        return [w for w, status in zip(workers, statuses) if status == -signal.SIGKILL]
    return [w for w, status in zip(workers, statuses) if status and (status < 0 or ErrorNote.read(w.note) is not None)]


def _kill(workers: Sequence[_Worker]) -> None:
    """End what still runs, with all that it started."""
    for worker in workers:
        if worker.status() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
    for worker in workers:
        worker.process.wait()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Inside it, SIGINT and SIGTERM raise JobInterrupted."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise JobInterrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _free_port() -> Iterator[int]:
    """A port of the loopback device; where the system allows it, nobody else is given it meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if not hasattr(os, "sched_getaffinity"):  # only Linux lets rank 0 listen while the port is held
            holder.close()
        yield port
