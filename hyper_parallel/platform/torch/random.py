"""Seeds for random operators on DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["draw_seed", "seeded", "set_seed"]


def draw_seed() -> int:
    """A 62-bit seed from the default CPU generator; activation checkpointing replays it with the generator's state."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu"))


def set_seed(seed: int) -> None:
    """Seed every default generator."""
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random operators inside draw from generators seeded with ``seed``; the states outside are untouched."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
