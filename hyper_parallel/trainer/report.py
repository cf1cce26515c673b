"""The last words of a run: how it went, a picture of the loss, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hyper_parallel.errors import how_to_install
from hyper_parallel.trainer.loss_picture import draw_losses
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import METRICS_FILE, PICTURE_FILE, SUMMARY_FILE, TENSORBOARD_FOLDER, RunSummary

__all__ = ["describe_run", "draw_picture", "missing_packages", "where_written"]

_INSTALL = f"install it with: {how_to_install('watch')}"


def missing_packages(options: TrainOptions) -> str | None:
    """What has to be installed for these options, in words; None: nothing."""
    if find_spec(options.backend) is None:
        return f"{options.backend} is not installed; install it with: {how_to_install(options.backend)}"
    if options.metrics.enable_tensorboard and find_spec("tensorboard") is None:
        return f"metrics.enable_tensorboard needs the package 'tensorboard'; {_INSTALL}"
    return None


def describe_run(options: TrainOptions, summary: RunSummary) -> str:
    """Some lines; draws the picture, too."""
    note = draw_picture(options, {summary.arrangement: options.output / METRICS_FILE})
    return "\n".join([summary.describe(), *note, where_written(options)])


def draw_picture(options: TrainOptions, runs: Mapping[str, Path]) -> list[str]:
    """The losses of ``runs`` (label -> metrics) as the picture of this run; returns a line when it cannot be drawn."""
    if not options.metrics.picture:
        return []
    try:
        draw_losses(runs, options.output / PICTURE_FILE)
    except ModuleNotFoundError as error:
        return [f"no picture of the loss: that needs the package {error.name!r}; {_INSTALL}"]
    return []


def where_written(options: TrainOptions, *more: Path) -> str:
    """The files and folders of a run, with what they are; ``more`` comes last."""
    folder = options.output
    known = {
        folder / METRICS_FILE: "each step",
        folder / SUMMARY_FILE: "the whole run",
        folder / PICTURE_FILE: "the loss as a picture",
        folder / TENSORBOARD_FOLDER: f"for tensorboard --logdir {folder}",
        folder / options.checkpoint.folder: "checkpoints",
        folder / "logs": "what ranks other than 0 have said",
    }
    lines = [f"  {path}  ({what})" for path, what in known.items() if path.exists()]
    return "\n".join(["written:", *lines, *(f"  {path}" for path in more)])
