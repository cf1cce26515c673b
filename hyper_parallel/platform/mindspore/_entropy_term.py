"""The entropy's part of the gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LOWEST", "EntropyTerm"]

LOWEST = -1e30
"""Stands for minus infinity beside a probability of 0, with which it has to give 0."""


class EntropyTerm(NamedTuple):
    """What the entropy adds to the gradient: ``factor log p_c`` beside each probability; one element a token."""

    factor: Any
    reference: Any
    log_sum_exp: Any

    def slope(self, rows: NDArray[Any], constant: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """``constant + factor log p_c`` of the tokens from ``start`` to ``stop``."""
        log_probs = rows - self.reference[start:stop, None]
        log_probs -= self.log_sum_exp[start:stop, None]
        np.maximum(log_probs, LOWEST, out=log_probs)
        log_probs *= self.factor[start:stop, None]
        log_probs += constant
        return log_probs
