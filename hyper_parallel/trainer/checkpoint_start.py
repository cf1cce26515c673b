"""From which checkpoint a job goes on, and what stands in its way. No collectives, no framework."""

from __future__ import annotations

import os
from pathlib import Path

from hyper_parallel.errors import CheckpointError
from hyper_parallel.trainer.checkpoint_folder import Place, list_steps, step_name
from hyper_parallel.trainer.checkpoint_read import open_whole_checkpoint
from hyper_parallel.trainer.checkpoint_state import TrainState, option_changes
from hyper_parallel.trainer.data import PackedText
from hyper_parallel.trainer.options import TrainOptions

__all__ = ["check_start", "check_state", "checkpoints_of", "find_start", "is_own", "place_of_start"]


def checkpoints_of(options: TrainOptions) -> Path:
    """The folder that the job writes its checkpoints into; one spelling for one folder."""
    return _real(options.output / options.checkpoint.folder)


def is_own(checkpoint: Path, options: TrainOptions) -> bool:
    """Whether it is one of those in the folder that the job writes into."""
    return _real(checkpoint).parent == checkpoints_of(options)


def place_of_start(options: TrainOptions) -> Place:
    """Where to look for a checkpoint."""
    settings = options.checkpoint
    named = settings.resume not in ("auto", "none")
    return Place(_real(Path(settings.resume) if named else options.output), settings.folder)


def find_start(options: TrainOptions) -> tuple[int, int]:
    """What :meth:`Place.find` finds there, and is wanted.

    Raises:
        CheckpointError: one was named and is not there, or checkpoints of another run are in the way.
        OSError: a folder cannot be read.
    """
    settings, place = options.checkpoint, place_of_start(options)
    unwanted = settings.resume == "none" or (settings.resume == "auto" and not settings.enable)
    found = Place.NOWHERE if unwanted else place.find()
    if found == Place.NOWHERE and settings.resume not in ("auto", "none"):
        raise CheckpointError(place.nothing())
    _check_room(options, None if found == Place.NOWHERE else place.at(found))
    return found


def check_start(options: TrainOptions, found: tuple[int, int], text: PackedText) -> None:
    """What can be known of going on from what :func:`find_start` has found, before any rank runs: by small files alone.

    Raises:
        CheckpointError: as :func:`check_state`; or the checkpoint is damaged.
    """
    if found == Place.NOWHERE:
        return
    path = place_of_start(options).at(found)
    try:
        state = open_whole_checkpoint(path)[1]
    except CheckpointError as error:
        hint = "; remove it to go on from the one before" if options.checkpoint.resume == "auto" else ""
        raise CheckpointError(f"{error}{hint}") from None
    try:
        check_state(path, state, options, text)
    except ValueError as error:
        hint = "; to begin anew, choose another --output" if options.checkpoint.resume == "auto" else ""
        raise CheckpointError(f"cannot go on from {path}: {error}{hint}") from None


def check_state(path: Path, state: TrainState, options: TrainOptions, text: PackedText) -> list[str]:
    """Options that have changed since the checkpoint was written, in words.

    Raises:
        CheckpointError: it does not fit the job.
        DataError: its position is not one in this text.
    """
    changes = option_changes(state.options, options)
    if text.resume(dict(state.data)) != state.step or state.step > options.steps:
        raise CheckpointError(f"{path} is of step {state.step}; expected at most steps ({options.steps})")
    return changes


def _check_room(options: TrainOptions, start: Path | None) -> None:
    """Nothing may be in the way of what this run will write, or be taken for its checkpoints later."""
    folder = checkpoints_of(options)
    steps = list_steps(folder)
    inside = start is not None and is_own(start, options)
    begins = next((step for step in steps if inside and start is not None and step_name(step) == start.name), -1)
    if others := [step for step in steps if step > begins]:
        if not options.checkpoint.enable:
            raise CheckpointError(
                f"{folder} holds {step_name(others[-1])} of an earlier run, which would be taken for one of this run; "
                "remove it, or choose another output folder (hyper-parallel train goes on from it with "
                "--checkpoint.enable)"
            )
        raise CheckpointError(
            f"{folder} holds {step_name(others[-1])} of another run, and this one begins "
            f"{'anew' if start is None else f'after {start}'}; remove it, go on from it "
            "(--checkpoint.resume auto), or choose another output folder"
        )


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
