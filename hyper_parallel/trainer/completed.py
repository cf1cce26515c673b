"""A job that is started again when it has nothing left to do: said, and nothing is touched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hyper_parallel.errors import CheckpointError
from hyper_parallel.trainer.checkpoint_folder import Place, step_name
from hyper_parallel.trainer.checkpoint_read import open_whole_checkpoint
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import RunSummary

__all__ = ["completed_run", "describe_completed"]


def completed_run(options: TrainOptions) -> RunSummary | None:
    """What the job has left in its output folder when the checkpoint that it would go on from is that of its last step;
    None when there is something to do, or that checkpoint is not whole. Reads small files alone; no collective.
    """
    settings = options.checkpoint
    if settings.resume == "none" or (settings.resume == "auto" and not settings.enable):
        return None
    start = options.output if settings.resume == "auto" else Path(settings.resume)
    place = Place(Path(os.path.realpath(start)), settings.folder)
    try:
        checkpoint = place.locate()
        if checkpoint != _folder(options) / step_name(options.steps):
            return None
        open_whole_checkpoint(checkpoint)
        summary = RunSummary.read(options.output)
    except (CheckpointError, OSError, ValueError, TypeError):
        return None
    return replace(summary, found_complete=True) if summary.steps == options.steps else None


def describe_completed(options: TrainOptions) -> str:
    """Two lines: that it is complete, and what to change to go on."""
    return (
        f"the job in {options.output} is complete: step {options.steps} of {options.steps}; nothing was done\n"
        f"to go on, raise --steps; to begin anew, choose another --output, or remove {_folder(options)}"
    )


def _folder(options: TrainOptions) -> Path:
    return Path(os.path.realpath(options.output / options.checkpoint.folder))
