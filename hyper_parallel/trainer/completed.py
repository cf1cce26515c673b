"""A job that is started again when it has nothing left to do: said, and nothing is touched."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.errors import CheckpointError
from hyper_parallel.trainer.checkpoint_folder import step_name
from hyper_parallel.trainer.checkpoint_read import open_whole_checkpoint
from hyper_parallel.trainer.checkpoint_start import checkpoints_of, is_own, place_of_start
from hyper_parallel.trainer.checkpoint_state import TrainState, option_changes
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import RunSummary
from hyper_parallel.trainer.validation_text import open_texts

__all__ = ["completed_run", "describe_completed"]

_OF_THE_TEXT = ("data", "seed", "text.", "training.batch_size", "training.sequence_length", "validation.")
"""Beginnings of the names of options that say which tokens are in which batch."""


def completed_run(options: TrainOptions) -> RunSummary | None:
    """What the job has left in its output folder when the checkpoint that it would go on from is that of its last step;
    None when there is something to do, or that checkpoint is not whole. No collective; reads small files alone, and the
    text where options that it depends on are others than those of the checkpoint.

    Raises:
        CheckpointError, DataError: it is complete, but could not have come of these options: what going on from the
            checkpoint would raise.
    """
    try:
        state = _last_state(options)
        if state is None:
            return None
        summary = RunSummary.read(options.output)
    except (CheckpointError, OSError, ValueError, TypeError):
        return None
    if summary.steps != options.steps:
        return None
    changed = {change.split(" ")[0] for change in option_changes(state.options, options)}
    if any(name.startswith(_OF_THE_TEXT) for name in changed):
        open_texts(options)[0].resume(dict(state.data))
    return replace(summary, found_complete=True)


def describe_completed(options: TrainOptions) -> str:
    """That it is complete, which options had no effect, and what to change to go on; some lines."""
    state = _last_state(options)
    changes = [] if state is None else option_changes(state.options, options)
    return "\n".join(
        [
            f"the job in {options.output} is complete: step {options.steps} of {options.steps}; nothing was done",
            *(f"  changed since then, without effect: {change}" for change in changes),
            f"to go on, raise --steps; to begin anew, choose another --output, or remove {checkpoints_of(options)}",
        ]
    )


def _last_state(options: TrainOptions) -> TrainState | None:
    """That of the checkpoint that the job would go on from, if it is the one of the last step."""
    settings = options.checkpoint
    if settings.resume == "none" or (settings.resume == "auto" and not settings.enable):
        return None
    checkpoint = place_of_start(options).locate()
    if not is_own(checkpoint, options) or checkpoint.name != step_name(options.steps):
        return None
    return open_whole_checkpoint(checkpoint)[1]
