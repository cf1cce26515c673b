"""What a validation finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Validation"]


@dataclass(frozen=True)
class Validation:
    """What a validation has found.

    Attributes:
        loss: mean over the tokens.
        tokens: how many had a label.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf
