"""Inside a worker process: die with the launcher, and leave it a note about what went wrong."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from hyper_parallel.trainer.error_note import ErrorNote
from hyper_parallel.trainer.launch_environment import is_scheduler
from hyper_parallel.trainer.roll import sign_in, watch_from_scheduler

__all__ = ["ERROR_FILE", "LIFELINE", "begun_file", "run_guarded", "speaks_for_job"]

ERROR_FILE = "HYPER_PARALLEL_ERROR_FILE"
"""Environment variable: where a worker writes why it failed."""

LIFELINE = "HYPER_PARALLEL_LIFELINE"
"""Environment variable: a file descriptor that ends when the launcher does."""


def begun_file(note: Path) -> Path:
    """Is there, beside the worker's note, while the worker has something left to do."""
    return note.with_suffix(".begun")


def run_guarded(work: Callable[[], int]) -> int:
    """Run what a worker has to do, and return its exit status.

    Under this library's launcher the process ends here, and an exception becomes a note and status 1. Under another
    launcher an exception ends the process, too, and its last line says of which rank it is.
    """
    if LIFELINE in os.environ:
        threading.Thread(target=_die_with_launcher, args=(int(os.environ[LIFELINE]),), daemon=True).start()
    if ERROR_FILE not in os.environ:
        return _run_elsewhere(work)
    note_file = Path(os.environ[ERROR_FILE])
    begun = begun_file(note_file)
    begun.touch()
    try:
        status = work()
        begun.unlink(missing_ok=True)
        _leave(status)
    except Exception as error:
        # The note comes first: peers notice this rank's end only after it, so the oldest note is the cause.
        ErrorNote.of(error).write(note_file)
        _leave(1)


def _run_elsewhere(work: Callable[[], int]) -> int:
    """Under torchrun or msrun, or as a job's only process."""
    if is_scheduler(os.environ):
        watch_from_scheduler(os.environ)
        return work()
    entry = sign_in(os.environ)
    try:
        status = work()
    except Exception as error:
        note = ErrorNote.of(error)
        if entry is not None:
            entry.fail(note)
        print(f"{note.trace}rank {_rank(os.environ)} failed: {note.kind}: {note.message}", file=sys.stderr)
        _leave(1)
    if entry is not None:
        entry.sign_out(status)
        if status:
            _leave(status)  # msrun kills the others now, and its scheduler would wait for them
    return status


def speaks_for_job(environment: Mapping[str, str]) -> bool:
    """Whether this process is the one to say what all processes of its job find: the launcher, else the first rank."""
    return ERROR_FILE not in environment and _rank(environment) == "0" and not is_scheduler(environment)


def _rank(environment: Mapping[str, str]) -> str:
    return environment.get("RANK", environment.get("RANK_ID", "0"))


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
