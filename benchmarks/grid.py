"""Which problems are measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["loss_cases"]


def loss_cases(quick: bool, dtypes: list[str], tokens: list[int], classes: list[int]) -> Iterator[dict[str, Any]]:
    """Everybody beside everybody. Few repetitions where one takes seconds."""
    for dtype in dtypes:
        for n in tokens:
            for v in classes:
                yield {
                    "dtype": dtype,
                    "tokens": n,
                    "classes": v,
                    "only": None,
                    "repetitions": 2 if quick else 5 if n * v <= 1 << 25 else 3,
                }
