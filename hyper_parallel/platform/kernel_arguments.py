"""What the loss kernels of :mod:`hyper_parallel.platform.loss_kernels` take and give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.shard_spec import chunk_ranges

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Group

__all__ = ["ClassShard", "LossOptions", "Tensor", "TokenOutputs"]

Tensor = Any
"""An array of the backend."""


@dataclass(frozen=True)
class ClassShard:
    """Which classes this rank holds, and who holds the others.

    Attributes:
        start: first class of this rank.
        stop: one past its last class; equal to ``start`` where it holds none.
        num_classes: classes of all ranks together.
        group: the ranks that share the class dim; None (or one member) when this rank holds all classes.
        ranges: ``[start, stop)`` of every member, ascending; None where only the own range is known. With it the plain
            loss sends 8 bytes a token instead of 12.
    """

    start: int
    stop: int
    num_classes: int
    group: Group | None = None
    ranges: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(cls, num_classes: int, group: Group | None) -> ClassShard:
        """This rank's of ``num_classes`` cut over ``group`` as ``torch.chunk`` does; all of them without a group."""
        if group is None:
            return cls(0, num_classes, num_classes)
        ranges = chunk_ranges(num_classes, group.size)
        return cls(*ranges[group.rank], num_classes, group, ranges)


@dataclass(frozen=True)
class LossOptions:
    """How the loss of a token is computed.

    Attributes:
        ignore_index: a token with this target has loss 0, token weight 0 and a gradient of exactly 0.
        label_smoothing: e of the formula, in [0, 1].
        z_loss: z of the formula, 0 or more.
        inplace: write the gradient into the memory of the logits, which then hold the gradient. The logits
            must be computed ones (not a leaf), and backward can run once. Other nodes that kept the logits
            for their own backward notice and raise.
        validate: agree with the other ranks on the arguments and look at the target values before computing.
            None means yes on CPU and no on accelerators, where it costs a device synchronisation.
            Unvalidated, a target outside ``[0, V)`` gives a loss and a gradient of NaN for its token.
        description: what the caller calls (operator, reduction); ranks that disagree on it get an error.
        reduction: what the caller makes of all tokens' losses. The kernels do not read it; callers agree on it.
        log_probs: whether :meth:`LossKernels.token_outputs` gives ``log p_y``.
        entropy: whether it gives the entropy. One pass more over the logits each way, and 4 bytes a token more are
            sent (none of the savings of ``ClassShard.ranges``).
        overlap_blocks: the tokens are cut into this many blocks; the exchange of each runs while the next one's
            statistics are computed. 1: one exchange, of all. No effect where the backend has no asynchronous
            collectives (MindSpore on CPU).
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    inplace: bool = False
    validate: bool | None = None
    description: str = ""
    log_probs: bool = False
    entropy: bool = False
    overlap_blocks: int = 1
    reduction: str = "none"


class TokenOutputs(NamedTuple):
    """What :meth:`LossKernels.token_outputs` gives of each token: 0 where ignored."""

    loss: Tensor
    token_weight: Tensor
    log_prob: Tensor | None
    entropy: Tensor | None
