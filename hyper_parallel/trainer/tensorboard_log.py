"""Numbers of a run as events for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TensorBoardLog"]

_EVENTS = "events.out.tfevents.*"


class TensorBoardLog:
    """Scalars in an event file, through the writer of the ``tensorboard`` package.

    Args:
        folder: where; TensorBoard shows all event files in it as one run.
        start: steps that an earlier part of this run has taken; 0: event files in the folder are another run's, and
            removed.

    Raises:
        ModuleNotFoundError: ``tensorboard`` is not installed.
    """

    def __init__(self, folder: Path, start: int = 0) -> None:
        from tensorboard.summary import Writer

        if start == 0:
            for file in folder.glob(_EVENTS):
                file.unlink()
        self._writer: Any = Writer(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        """All numbers of a row of ``metrics.jsonl``, under their names."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, float(value), row["step"])

    def flush(self) -> None:
        """Let others see what was written."""
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()
