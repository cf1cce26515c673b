"""How a cost grows: the exponent of a power law."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["exponent"]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """b of ``cost = a size^b``, by least squares on logarithms.

    Example:
        >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
        1.0
    """
    xs, ys = [math.log(x) for x in sizes], [math.log(y) for y in costs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)
