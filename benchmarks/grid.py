"""Which problems are measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["FIT_CLASSES", "FIT_TOKENS", "fit_cases", "loss_cases"]

_OURS = ["ours: functional, in place"]

FIT_TOKENS = (512, 1024, 2048, 4096)
FIT_CLASSES = (32768, 65536, 131072, 262144)


def loss_cases(quick: bool, dtypes: list[str], tokens: list[int], classes: list[int]) -> Iterator[dict[str, Any]]:
    """Everybody beside everybody. Few repetitions where one takes seconds."""
    for dtype in dtypes:
        for n in tokens:
            for v in classes:
                yield _case(dtype, n, v, None, 2 if quick else 5 if n * v <= 1 << 25 else 3)


def fit_cases(quick: bool) -> Iterator[dict[str, Any]]:
    """Ours alone, over tokens and over classes, large enough that a call's fixed cost does not count."""
    repetitions = 5 if quick else 15
    for tokens in FIT_TOKENS:
        yield _case("float32", tokens, FIT_CLASSES[0], _OURS, repetitions)
    for classes in FIT_CLASSES[1:]:
        yield _case("float32", FIT_TOKENS[0], classes, _OURS, repetitions)


def _case(dtype: str, tokens: int, classes: int, only: list[str] | None, repetitions: int) -> dict[str, Any]:
    return {"dtype": dtype, "tokens": tokens, "classes": classes, "only": only, "repetitions": repetitions}
