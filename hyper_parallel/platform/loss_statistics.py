"""What the ranks tell each other about each token's logits, and in how many collectives; the same for all backends.

For the plain loss each rank sends two numbers a token. From a rank without the target's class these are its reference m
(its largest logit, say) and ``log sum_exp``. The rank that has the class sends its logit ``x_y`` and
``lse_local - x_y``: everybody knows who that is, so the place of m is free for ``x_y``, and the loss is a log-sum-exp
of numbers relative to ``x_y``, as exact as one relative to the largest. Where ``lse_local - x_y`` is large its own
rounding would show in the other ranks' gradients; everybody sees that in what was gathered, and all gather m, sum_exp
and ``x_y`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

__all__ = [
    "ELSEWHERE",
    "IGNORED",
    "LARGEST_GAP",
    "MergedStatistics",
    "ShardStatistics",
    "Strategy",
    "choose_strategy",
]

ELSEWHERE = -1
"""Target index of a token whose target's class another rank holds."""

IGNORED = -2
"""Target index of a token whose target is ``ignore_index``."""

LARGEST_GAP = 32.0
"""Up to this ``lse_local - x_y``, its rounding (2e-6 in fp32) stays below what fp32 gradients show."""

_LARGEST_GATHER = 8
"""Up to this many ranks one all-gather is used, whatever its size; it waits for the network half as often as two
all-reduces or less, and sends little more (docs/guide/communication.md)."""

_SMALL_GATHER = 16 << 20
"""In larger groups it is used as long as no more bytes than these come together."""

Strategy = Literal["gather", "reduce"]
"""One all-gather, or an all-reduce of the maxima and then one of everything else."""

Vector = TypeVar("Vector")
"""One number a token: the backend's array, fp32 or fp64."""


@dataclass(frozen=True)
class ShardStatistics(Generic[Vector]):
    """Per token, over the classes of one rank; -inf and zeros where it has none."""

    reference: Vector
    """The largest logit, or another number as near to the log-sum-exp: what the others are taken relative to."""
    sum_exp: Vector
    """``sum_c exp(x_c - reference)``."""
    target_logit: Vector | None = None
    """``x_y``; 0 where another rank holds the target's class."""
    shortfall: Vector | None = None
    """For smoothing: ``sum_c w_c (a - x_c)``, where a is the reference, or 0 for one of -inf."""
    weight_sum: Vector | None = None
    """For smoothing: ``sum_c w_c``, one number."""
    mean: Vector | None = None
    """For the entropy: ``sum_c q_c (x_c - a)`` with q the softmax of these classes and a as above."""

    @property
    def vectors(self) -> list[Vector]:
        """Those with one number a token that are there, in the order they are sent in."""
        every = (self.reference, self.sum_exp, self.target_logit, self.mean, self.shortfall)
        return [vector for vector in every if vector is not None]

    @property
    def nbytes(self) -> int:
        """What a rank sends of them in an all-gather."""
        return len(self.vectors) * int(self.reference.nbytes)  # type: ignore[attr-defined]

    @property
    def is_plain(self) -> bool:
        """Whether neither smoothing nor the entropy is asked for."""
        return self.shortfall is None and self.mean is None


@dataclass(frozen=True)
class MergedStatistics(Generic[Vector]):
    """Per token, over the classes of all ranks; bitwise equal on all of them, but for ``share``."""

    reference: Vector
    """The largest of the ranks' references, or the target's logit: what the others are taken relative to."""
    log_sum_exp: Vector
    """``log sum_c exp(x_c - reference)``, so that ``lse = reference + log_sum_exp``."""
    share: Vector
    """``sum_c p_c`` over this rank's classes: local softmax times this is the softmax over all."""
    target_gap: Vector | None
    """``reference - x_y``, so that ``nll = target_gap + log_sum_exp``."""
    shortfall: Vector | None
    """``sum_c w_c (reference - x_c)``."""
    weight_sum: Vector | None
    """``sum_c w_c``."""
    mean: Vector | None = None
    """``sum_c p_c (x_c - reference)``."""


def choose_strategy(ranks: int, nbytes: int) -> Strategy:
    """By the size of the group, and in larger ones by the bytes that an all-gather would bring together.

    Args:
        ranks: of the group.
        nbytes: what each of them has to send, :attr:`ShardStatistics.nbytes`.

    Example:
        >>> choose_strategy(16, 1 << 20), choose_strategy(16, 1 << 21), choose_strategy(8, 1 << 21)
        ('gather', 'reduce', 'gather')
    """
    return "gather" if ranks <= _LARGEST_GATHER or ranks * nbytes <= _SMALL_GATHER else "reduce"
