"""Inside a worker process: die with the launcher, and leave it a note about what went wrong."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

__all__ = ["ERROR_FILE", "LIFELINE", "ErrorNote", "begun_file", "run_guarded", "speaks_for_job"]

ERROR_FILE = "HYPER_PARALLEL_ERROR_FILE"
"""Environment variable: where a worker writes why it failed."""

LIFELINE = "HYPER_PARALLEL_LIFELINE"
"""Environment variable: a file descriptor that ends when the launcher does."""


@dataclass(frozen=True)
class ErrorNote:
    """An exception, as the launcher reads it.

    Attributes:
        kind: name of its class.
        message: its text.
        trace: the traceback.
        time: when it was caught, in seconds of the system clock.
    """

    kind: str
    message: str
    trace: str
    time: float

    @classmethod
    def read(cls, path: Path) -> ErrorNote | None:
        """The note at ``path``; None where there is none, or a half-written one."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Leave it at ``path``; whole or not at all."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.replace(path)


def begun_file(note: Path) -> Path:
    """Is there, beside the worker's note, while the worker has something left to do."""
    return note.with_suffix(".begun")


def run_guarded(work: Callable[[], int]) -> int:
    """Run what a worker has to do, and return its exit status.

    Under this library's launcher the process ends here, and an exception becomes a note and status 1; under
    another launcher both are left to the caller.
    """
    if LIFELINE in os.environ:
        threading.Thread(target=_die_with_launcher, args=(int(os.environ[LIFELINE]),), daemon=True).start()
    if ERROR_FILE not in os.environ:
        return work()
    note_file = Path(os.environ[ERROR_FILE])
    begun = begun_file(note_file)
    begun.touch()
    try:
        status = work()
        begun.unlink(missing_ok=True)
        _leave(status)
    except Exception as error:
        # The note comes first: peers notice this rank's end only after it, so the oldest note is the cause.
        trace = "".join(traceback.format_exception(error))
        note = ErrorNote(type(error).__name__, str(error), trace, time.time())
        note.write(note_file)
        _leave(1)


def speaks_for_job(environment: Mapping[str, str]) -> bool:
    """Whether this process is the one to say what all processes of its job find: the launcher, else the first rank."""
    rank = environment.get("RANK", environment.get("RANK_ID", "0"))
    return ERROR_FILE not in environment and rank == "0" and environment.get("MS_ROLE") != "MS_SCHED"


def _die_with_launcher(descriptor: int) -> None:
    os.read(descriptor, 1)  # returns when the launcher, which never writes, has ended
    os._exit(1)


def _leave(status: int) -> NoReturn:
    """Without Python's own end, which takes seconds with a framework loaded, and may wait for peers."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
