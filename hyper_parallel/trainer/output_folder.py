"""Where a run writes: a path in which ``{backend}`` stands for the name of the framework."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["check_output", "settle_output", "with_open_output"]

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


def check_output(output: Path) -> None:
    """Make the folder, or say why that cannot be.

    Raises:
        ValueError: a file is in its place or above it, or nobody may write there.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the output folder {output}: {error.strerror}") from None
    if not os.access(output, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write into the output folder {output}")
