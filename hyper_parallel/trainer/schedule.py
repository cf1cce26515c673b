"""Learning-rate schedule."""

from __future__ import annotations

import math

__all__ = ["warmup_cosine"]


def warmup_cosine(step: int, *, peak: float, warmup_steps: int, total_steps: int, final_ratio: float) -> float:
    """Learning rate of ``step`` (the first is 0): linear, then half a cosine.

    From ``peak / warmup_steps`` up to ``peak``, and down to ``final_ratio * peak`` at the last step.

    The cosine is that of Loshchilov and Hutter (arXiv 1608.03983) without restarts.

    Example:
        >>> [warmup_cosine(s, peak=1.0, warmup_steps=2, total_steps=4, final_ratio=0.0) for s in range(4)]
        [0.5, 1.0, 1.0, 0.0]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = max(1, total_steps - warmup_steps - 1)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    return peak * (final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
