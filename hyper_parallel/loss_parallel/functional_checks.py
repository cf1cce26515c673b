"""What the losses called by name check of their arguments, and how they find out which classes a rank holds."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.exchange import gather_numbers
from hyper_parallel.core.process_group import resolve_group
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.errors import LossParallelLayoutError
from hyper_parallel.platform import Group
from hyper_parallel.platform.loss_kernels import ClassShard
from hyper_parallel.platform.platform import Tensor

__all__ = ["check_reduction", "find_shard", "group_of"]


def check_reduction(reduction: str) -> None:
    """Raise ValueError for an unknown one."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction is {reduction!r}; expected 'none', 'sum' or 'mean'")


def group_of(group: Any) -> Group | None:
    """What users pass as ``group``, as a group of ours; None for one rank alone."""
    return None if group is None else resolve_group(group)


def find_shard(width: int, group: Group | None, num_classes: int | None, like: Tensor) -> ClassShard:
    """The classes of this rank, which holds ``width`` of them.

    Collectives: without ``num_classes``, an all-gather of 8 bytes a rank.

    Raises:
        LossParallelLayoutError: without ``num_classes``: the ranks' widths are not those of ``torch.chunk``; the same
            error on all of them.
        ValueError: ``num_classes`` is negative.
    """
    if num_classes is not None and num_classes < 0:
        raise ValueError(f"num_classes is {num_classes}; expected 0 or more")
    if group is None or group.size == 1:
        return ClassShard.of(width if num_classes is None else num_classes, None)
    if num_classes is None:
        widths = gather_numbers([width], group, like)[:, 0].tolist()
        num_classes = sum(widths)
        wanted = tuple(stop - start for start, stop in chunk_ranges(num_classes, group.size))
        if tuple(widths) != wanted:
            raise LossParallelLayoutError(
                f"the ranks of the class group hold {tuple(widths)} of {num_classes} classes; expected {wanted}, as "
                "torch.chunk cuts them"
            )
    return ClassShard.of(num_classes, group)
