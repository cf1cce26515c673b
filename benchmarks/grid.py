"""Which problems are measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["fit_cases", "loss_cases"]

_OURS = ["ours: context, DTensor", "ours: functional", "ours: functional, in place"]


def loss_cases(quick: bool, dtypes: list[str], tokens: list[int], classes: list[int]) -> Iterator[dict[str, Any]]:
    """Everybody beside everybody. Few repetitions where one takes seconds."""
    for dtype in dtypes:
        for n in tokens:
            for v in classes:
                yield _case(dtype, n, v, None, 2 if quick else 5 if n * v <= 1 << 25 else 3)


def fit_cases(quick: bool) -> Iterator[dict[str, Any]]:
    """Ours alone, over tokens and over classes, large enough that a call's fixed cost does not count."""
    repetitions = 3 if quick else 7
    for tokens in (128, 256, 512, 1024):
        yield _case("float32", tokens, 32768, _OURS[-1:], repetitions)
    for classes in (16384, 65536, 131072):
        yield _case("float32", 256, classes, _OURS[-1:], repetitions)


def _case(dtype: str, tokens: int, classes: int, only: list[str] | None, repetitions: int) -> dict[str, Any]:
    return {"dtype": dtype, "tokens": tokens, "classes": classes, "only": only, "repetitions": repetitions}
