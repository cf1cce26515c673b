"""One outcome on all ranks: either everybody goes on, or everybody raises the same error."""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hyper_parallel.core.exchange import gather_numbers, gather_texts
from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group
from hyper_parallel.platform.platform import Tensor

__all__ = ["agree", "say_so_when_alone"]

_WAIT_SECONDS = 10.0
_NUMBERS = 2
"""Every call sends as many, so that calls that do not belong together still meet in the same collective."""


def agree(
    error: Exception | None, view: Sequence[str], what: str, group: Group, like: Tensor, numbers: Sequence[int] = ()
) -> np.ndarray:
    """Tell the other ranks how it went here.

    Collectives: one all-gather of 40 bytes; one of texts when something is wrong.

    Args:
        error: what went wrong on this rank.
        view: lines that must be the same on all ranks.
        what: the step that all ranks must be at.
        group: the ranks.
        like: a tensor on the device that they communicate from.
        numbers: up to two integers to tell the others.

    Returns:
        ``[ranks, 2]``: everybody's numbers, 0 where none was given.

    Raises:
        CheckpointError: the same on every rank, when any has an error, or when they are at different steps or see
            different things.
    """
    text = "\n".join(view) if error is None else str(error) or type(error).__name__
    header = [error is not None, _digest(what), _digest(text), *numbers, *[0] * (_NUMBERS - len(numbers))]
    seen = gather_numbers(header, group, like)
    failed = seen[:, 0].astype(bool)
    if not failed.any() and (seen[:, :3] == seen[0, :3]).all():
        return seen[:, 3:]
    texts = gather_texts(f"{what}\n{text}", group, like)
    raise CheckpointError(_message(failed.tolist(), texts, group)) from error


@contextmanager
def say_so_when_alone(what: str, group: Group) -> Iterator[None]:
    """Warn when the first collective of a call takes long: a rank that never calls cannot be told from a slow one."""
    if group.size == 1:
        yield
        return
    text = (
        f"{what} is collective: rank {group.ranks[group.rank]} has waited {_WAIT_SECONDS:g} s for all of the ranks "
        f"{group.ranks} to call it. Is it called under a condition such as `if rank == 0`?"
    )
    timer = threading.Timer(_WAIT_SECONDS, warnings.warn, (text, RuntimeWarning))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _message(failed: list[bool], texts: list[str], group: Group) -> str:
    steps, bodies = zip(*(text.split("\n", 1) if "\n" in text else (text, "") for text in texts))
    different = next((i for i, step in enumerate(steps) if step != steps[0]), None)
    if different is not None:
        return (
            f"ranks are at different steps: rank {group.ranks[0]} at {steps[0]!r}, rank {group.ranks[different]} at "
            f"{steps[different]!r}; these calls are collective, every rank must make the same ones"
        )
    if all(failed) and len(set(bodies)) == 1:
        return str(bodies[0])
    if any(failed):
        return "; ".join(f"rank {group.ranks[i]}: {body}" for i, body in enumerate(bodies) if failed[i])
    other = next(i for i, body in enumerate(bodies) if body != bodies[0])
    pairs = zip(bodies[0].split("\n"), bodies[other].split("\n"))
    one, two = next(((a, b) for a, b in pairs if a != b), (bodies[0], bodies[other]))
    return f"ranks see different things: rank {group.ranks[0]} {one!r}, rank {group.ranks[other]} {two!r}"


def _digest(text: str) -> int:
    return zlib.crc32(text.encode(errors="replace"))
