"""What can be set of a job's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CheckpointOptions"]


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints from which a job goes on: weights, optimizer, position in the data, random states."""

    enable: bool = False
    """Write checkpoints, and with ``resume auto`` go on from the last one."""

    folder: str = "checkpoints"
    """Where they are written: ``<output>/<folder>/step_000123/``."""

    interval: int = 500
    """Steps between two checkpoints. One more follows the last step."""

    keep_latest_k: int = 3
    """Older ones than so many are removed when a new one is whole; 0: none is."""

    resume: str = "auto"
    """``auto``: go on from the last checkpoint in the folder, if there is one. ``none``: start anew; the folder must
    not hold checkpoints then. Else the path of a checkpoint, or of the folder of a run, whose last one is taken."""

    save_on_stop: bool = True
    """Write one when the job is stopped by Ctrl-C or SIGTERM, after the step that it is at."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"checkpoint interval must be at least 1, found {self.interval}")
        if self.keep_latest_k < 0:
            raise ValueError(f"keep_latest_k must be at least 0, found {self.keep_latest_k}")
        if not self.folder or not self.resume:
            raise ValueError(f"checkpoint folder and resume must not be empty, found {self.folder!r}, {self.resume!r}")
