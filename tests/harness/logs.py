"""What a process printed, read when a test needs it."""

from __future__ import annotations

from pathlib import Path

_MOST_LINES = 60


class Log:
    """The output file of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = 0

    def mark(self) -> None:
        """Forget what was printed so far."""
        self._mark = self._path.stat().st_size

    def tail(self) -> str:
        """The last lines printed since the mark."""
        with open(self._path, "rb") as file:
            file.seek(self._mark)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_MOST_LINES:])
