"""What can be set of how a job is watched."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MetricsOptions"]


@dataclass(frozen=True)
class MetricsOptions:
    """What is kept beside ``metrics.jsonl``, for a person to look at."""

    enable_tensorboard: bool = False
    """Write events for TensorBoard into ``<output>/tensorboard``; needs the package of that name."""

    picture: bool = True
    """Draw the loss into ``<output>/loss.png`` at the end; needs matplotlib, without which there is a note instead."""
