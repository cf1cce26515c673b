"""A job that is started again when it has nothing left to do: said, and nothing is touched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hyper_parallel.errors import CheckpointError
from hyper_parallel.trainer.checkpoint_folder import Place, step_name
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import RunSummary

__all__ = ["completed_run", "describe_completed"]


def completed_run(options: TrainOptions) -> RunSummary | None:
    """What the job has left in its output folder when the checkpoint that it would go on from is that of its last step;
    None when there is something to do. Reads names and the summary alone; no collective.
    """
    settings = options.checkpoint
    if settings.resume == "none" or (settings.resume == "auto" and not settings.enable):
        return None
    start = options.output if settings.resume == "auto" else Path(settings.resume)
    place = Place(Path(os.path.realpath(start)), settings.folder)
    try:
        checkpoint = place.locate()
        summary = RunSummary.read(options.output)
    except (CheckpointError, OSError, ValueError, TypeError):
        return None
    last = _folder(options) / step_name(options.steps)
    return replace(summary, found_complete=True) if checkpoint == last and summary.steps == options.steps else None


def describe_completed(options: TrainOptions) -> str:
    """Two lines: that it is complete, and what to change to go on."""
    return (
        f"the job in {options.output} is complete: step {options.steps} of {options.steps}; nothing was done\n"
        f"to go on, raise --steps; to begin anew, choose another --output, or remove {_folder(options)}"
    )


def _folder(options: TrainOptions) -> Path:
    return Path(os.path.realpath(options.output / options.checkpoint.folder))
