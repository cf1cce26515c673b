"""Loss curves as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hyper_parallel.trainer.summary import read_column, read_losses

__all__ = ["draw_losses"]


def draw_losses(runs: Mapping[str, Path], target: Path) -> None:
    """Draw the loss of each step, one curve a run; dots are validations.

    Args:
        runs: label -> JSON lines file of metrics.
        target: the PNG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; an earlier picture is gone all the same.
    """
    target.unlink(missing_ok=True)  # not the picture of another run, whatever happens
    from matplotlib.figure import Figure  # here: half a second that only this needs
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (label, path), style in zip(runs.items(), ("-", "--", ":", "-."), strict=False):
        losses = read_losses(path)
        (line,) = axes.plot(list(losses), list(losses.values()), style, label=label, linewidth=1.2)
        if validation := read_column(path, "validation_loss"):
            dots = f"{label}, validation"
            axes.plot(list(validation), list(validation.values()), "o", color=line.get_color(), label=dots)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
