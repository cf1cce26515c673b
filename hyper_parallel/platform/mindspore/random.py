"""Seeds for random operators on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common.generator import default_generator

__all__ = ["draw_seed", "older_dropout", "peek_seed", "seeded", "set_seed", "with_fresh_seed"]

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


def older_dropout(x: Tensor, keep_prob: float, *_: int) -> Any:
    """The primitive Dropout with seeds from the default generator.

    As it comes it carries seeds from ``mindspore.set_seed``, or (0, 0), "choose some": neither lets several ranks draw
    alike, or differently, on purpose.
    """
    word = int(_draw())
    return ops.Dropout(keep_prob, word % (2**31 - 1) + 1, word >> 33)(x)


def with_fresh_seed(op_call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator whose last arguments are a seed and an offset, drawn from the default generator when it runs."""

    def run(*args: Any) -> Any:
        seed, offset = default_generator._step(Tensor(_STEP, mindspore.int64))
        return op_call(*args[:-2], seed, offset)

    return run


def _draw() -> np.uint64:
    numbers = [int(t.asnumpy()) % 2**64 for t in default_generator._step(Tensor(_STEP, mindspore.int64))]
    return np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]  # type: ignore[no-any-return]
