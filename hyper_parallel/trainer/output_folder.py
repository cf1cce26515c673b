"""Where a run writes: a path in which ``{backend}`` stands for the name of the framework, and how it is known later for
what it is, so that nobody takes it for text.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["MARK", "check_output", "mark_output", "settle_output", "what_is_written", "with_open_output"]

MARK = ".hyper_parallel_output"
"""An empty file in each folder that a command writes into."""

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


def mark_output(folder: Path) -> None:
    """Make the folder, if need be, and say in it that what it holds is written by a command. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def what_is_written(folder: Path, names: Collection[str]) -> str | None:
    """What a command has written into a folder that holds files of these names; None where it is none of that.

    Besides those with the mark these are folders that were copied in parts: with the metrics of a run, with a
    checkpoint, with a model.
    """
    if MARK in names or ("metrics.jsonl" in names and _are_metrics(folder / "metrics.jsonl")):
        return "output of hyper-parallel"
    if {"manifest.json", "state.json"} <= set(names):
        return "a checkpoint of training"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "the weights of a model"
    return None


def _are_metrics(file: Path) -> bool:
    """Whether the first line is one of a run; a data set may have a file of that name as well."""
    try:
        with open(file, "rb") as lines:
            row = json.loads(lines.readline(1 << 16))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.keys() >= {"step", "loss", "grad_norm"}
