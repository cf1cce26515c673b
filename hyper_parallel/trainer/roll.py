"""Under msrun: a roll of the ranks on this machine, so that one that fails or vanishes ends the job in seconds.

MindSpore's scheduler misses a rank only after half a minute, and msrun waits for the scheduler. So each rank holds a
lock on a file of its own while it has something to do, and a small process beside the scheduler looks after the locks:
the system opens them when a process ends, however it ends. Where this cannot work, all is as it would be without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hyper_parallel.trainer.error_note import ErrorNote

__all__ = ["Entry", "sign_in", "watch_from_scheduler"]

_POLL_SECONDS = 0.2

_EARLIER_SECONDS = 5.0
"""A rank may have vanished so long before anybody looks; an older file is one that another job has left."""

_KILL_SECONDS = 2.0
"""After a failure, time that msrun gets to end the other ranks."""

_VANISHED = "it ended before its work was done (the system kills a process when memory runs out)"


class Entry:
    """A rank's own, from signing in to signing out or the end of the process."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self._path = path
        self._lock = lock

    def sign_out(self, status: int) -> None:
        """All is done that was to do; after a status other than 0 the process has to end, and the job does."""
        if status:
            self.fail(ErrorNote("", f"ended with exit status {status}", "", time.time()))
            return
        with contextlib.suppress(OSError):
            self._path.unlink()

    def fail(self, note: ErrorNote) -> None:
        """Leave word of an error; the process has to end after it."""
        with contextlib.suppress(OSError):
            note.write(_note_of(self._path))


def sign_in(environment: Mapping[str, str]) -> Entry | None:
    """The entry of this process; None where it is no rank under msrun, or the roll cannot be kept."""
    if environment.get("MS_ROLE") != "MS_WORKER" or "MS_NODE_ID" not in environment:
        return None
    try:
        folder = _open_folder(environment)
        draft, path = folder / f".{os.getpid()}", folder / f"rank{environment['MS_NODE_ID']}"
        lock = open(draft, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.write(str(os.getpid()))
        lock.flush()
        draft.replace(path)  # nobody sees it without its lock
        return Entry(path, lock)
    except OSError:
        return None


def watch_from_scheduler(environment: Mapping[str, str]) -> None:
    """Start the process that looks after the roll; it ends with this one, which is blocked while it serves."""
    with contextlib.suppress(OSError):
        since = time.time() - _EARLIER_SECONDS
        what = [str(_open_folder(environment)), str(os.getpid()), str(since)]
        line = [sys.executable, "-m", "hyper_parallel.trainer.roll", *what]
        subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)


def _open_folder(environment: Mapping[str, str]) -> Path:
    """The job's: on one machine, one scheduler has an address at a time."""
    address = f"{environment.get('MS_SCHED_HOST')}_{environment.get('MS_SCHED_PORT')}"
    folder = Path(tempfile.gettempdir()) / f"hyper_parallel_{os.getuid()}_{address}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is somebody else's")
    return folder


def _note_of(path: Path) -> Path:
    return path.with_suffix(".json")


@dataclass(frozen=True)
class _Rank:
    """What the roll says of one that has not signed out."""

    path: Path
    process: int
    signed_in: float
    present: bool

    @property
    def name(self) -> str:
        return f"rank {self.path.name.removeprefix('rank')}"

    def note(self) -> ErrorNote | None:
        return ErrorNote.read(_note_of(self.path))

    def was_seen_to_end(self) -> bool:
        """Whether the parent knows that the process has ended. Those that msrun kills it does not wait for."""
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        return False


def _watch(folder: Path, scheduler: int, since: float) -> None:
    """Look after the roll until the scheduler has ended, or a rank has failed; then say which, and end the job."""
    seen: set[Path] = set()
    while os.getppid() == scheduler:
        ranks = _look(folder)
        seen.update(r.path for r in ranks if r.present)
        if failed := [r for r in ranks if not r.present and (r.path in seen or r.signed_in > since)]:
            print(f"ERROR: {_explain(failed)}", file=sys.stderr, flush=True)  # msrun shows lines with this word
            _end_job(folder, scheduler)
            break
        time.sleep(_POLL_SECONDS)
    _clear(folder)


def _look(folder: Path) -> list[_Rank]:
    """Those that are at work, and those that have ended in it."""
    found = []
    for path in sorted(folder.glob("rank*[0-9]")):
        with contextlib.suppress(FileNotFoundError), open(path, "r+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                present = False
            except BlockingIOError:
                present = True
            # not there any more: signed out meanwhile
            found.append(_Rank(path, int(file.read()), path.stat().st_mtime, present))
    return found


def _explain(failed: Sequence[_Rank]) -> str:
    """The oldest note is the cause; without one, a rank is that msrun has not killed itself because of another."""
    notes = [(note.time, rank, note) for rank in failed if (note := rank.note()) is not None]
    if notes:
        _, rank, note = min(notes, key=lambda found: found[0])
        return f"{rank.name} failed: {note.kind}: {note.message}" if note.kind else f"{rank.name} {note.message}"
    first = max(failed, key=_Rank.was_seen_to_end)
    return f"{first.name} failed: {_VANISHED}"


def _end_job(folder: Path, scheduler: int) -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while any(r.present for r in _look(folder)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    processes = [r.process for r in _look(folder) if r.present]
    for process in [*processes, *([scheduler] if os.getppid() == scheduler else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _clear(folder: Path) -> None:
    """Remove the folder once its ranks have ended; it stays where the next job has signed in already."""
    deadline = time.monotonic() + _KILL_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        for path in [*(r.path for r in _look(folder) if not r.present), *folder.glob("*.json")]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        _watch(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
