"""Where a run writes: a path in which ``{backend}`` stands for the name of the framework."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["settle_output", "with_open_output"]

_PATTERN = "_output_pattern"

Options = TypeVar("Options")


def settle_output(options: Any) -> None:
    """Put the name of ``options.backend`` into ``options.output``; for ``__post_init__`` of frozen options."""
    object.__setattr__(options, _PATTERN, options.output)
    object.__setattr__(options, "output", Path(str(options.output).replace("{backend}", options.backend)))


def with_open_output(options: Options) -> Options:
    """A copy whose output names no framework yet, to be completed when the backend is known."""
    copied = copy.copy(options)
    object.__setattr__(copied, "output", getattr(options, _PATTERN))
    return copied
