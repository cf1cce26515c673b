"""What went wrong in a process, left in a file for another."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ErrorNote"]


@dataclass(frozen=True)
class ErrorNote:
    """An exception, as those read it that look after the job.

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
    def of(cls, error: Exception) -> ErrorNote:
        """That of an exception that was caught now."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)), time.time())

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
