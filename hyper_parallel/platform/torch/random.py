"""Seeds for random operators on DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["draw_seed", "peek_seed", "seeded", "set_seed"]


def draw_seed() -> int:
    """A 62-bit seed from the default CPU generator; activation checkpointing replays it with the generator's state."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu"))


def peek_seed() -> int:
    """The next :func:`draw_seed`, leaving the generator where it is."""
    with torch.random.fork_rng(devices=[]):
        return draw_seed()


def set_seed(seed: int) -> None:
    """Seed every default generator."""
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random operators inside draw from generators seeded with ``seed``; the states outside are untouched."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if used else []):
        torch.default_generator.manual_seed(seed)
        if used:
            torch.cuda.manual_seed(seed)
        yield
