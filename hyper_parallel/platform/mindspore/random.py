"""Seeds for random operators on DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.common.generator import default_generator

__all__ = ["draw_seed", "kernel_seeds", "peek_seed", "seeded", "set_seed"]

_STEP = 12
"""How far one draw moves the generator on, as MindSpore's own operators do."""


def draw_seed() -> int:
    """A 62-bit seed from the default generator; its saved state replays the draw."""
    return int(_draw()) >> 2


def peek_seed() -> int:
    """The next :func:`draw_seed`, leaving the generator where it is."""
    state = mindspore.get_rng_state()
    seed = draw_seed()
    mindspore.set_rng_state(state)
    return seed


def set_seed(seed: int) -> None:
    """Seed the default generator, and what MindSpore's older operators and initialisers draw from."""
    mindspore.manual_seed(seed)
    mindspore.set_seed(seed % 2**31)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The default generator is seeded with ``seed`` inside; its state outside is untouched."""
    state = mindspore.get_rng_state()
    mindspore.manual_seed(seed)
    try:
        yield
    finally:
        mindspore.set_rng_state(state)


def kernel_seeds() -> tuple[int, int]:
    """Two seeds, not both 0, for an older random primitive, drawn from the default generator.

    Such primitives carry their seeds with them, and come with (0, 0), "choose some", unless ``mindspore.set_seed`` was
    called: neither lets several ranks draw alike, or differently, on purpose.
    """
    word = _draw()
    return int(word & np.uint64(2**31 - 1)) or 1, int(word >> np.uint64(33))


def _draw() -> np.uint64:
    numbers: list[Any] = [int(t.asnumpy()) % 2**64 for t in default_generator._step(Tensor(_STEP, mindspore.int64))]
    return np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]  # type: ignore[no-any-return]
