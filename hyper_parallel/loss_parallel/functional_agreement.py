"""One decision on all ranks about a function called by name, in one small exchange before its own collectives.

A rank that raised on its own would leave the others waiting. So what a rank finds wrong, what all ranks must tell alike
and how many classes each holds go into one header. Only if something is wrong are texts exchanged, and all ranks raise
the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from hyper_parallel.core.exchange import gather_numbers, gather_texts
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.errors import LossParallelLayoutError
from hyper_parallel.loss_parallel.agreement import error_of, text_of
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.loss_kernels import ClassShard
from hyper_parallel.platform.platform import Tensor

__all__ = ["Seen", "settle_shard", "validates"]


@dataclass(frozen=True)
class Seen:
    """What a rank sees of its own call.

    Attributes:
        width: the classes that it holds.
        shared: what all ranks must see alike, by the names for messages.
        check: raises what is wrong with the classes known; it may raise only what all ranks find alike.
    """

    width: int
    shared: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[ClassShard], None] = lambda shard: None


Look = Callable[["ClassShard | None"], Seen]
"""Raises what this rank finds wrong; takes its shard of ``num_classes``, None where these have to be asked for."""


def validates(validate: bool | None, *tensors: Any) -> bool:
    """Whether to agree: as the caller says; by default where looking at values costs nothing extra."""
    if validate is not None:
        return validate
    platform = get_platform()
    found = next((x for x in tensors if platform.is_tensor(x)), None)
    return found is None or platform.loss_kernels.validates_by_default(found)


def settle_shard(
    look: Look, group: Group | None, num_classes: int | None, like: Tensor, validate: bool
) -> ClassShard:
    """The classes of this rank, once all ranks of the group have found their calls right, and the same.

    Args:
        look: see :data:`Look`.
        group: the ranks that share the classes; None: this one alone.
        num_classes: as the caller says it.
        like: a tensor on the device that the group communicates from.
        validate: False: this rank looks at its own call only, and raises on its own.

    Collectives:
        An all-gather of 24 bytes a rank if validating; else one of 8 bytes a rank without ``num_classes``. One of texts
        beside the first where something is wrong.

    Raises:
        LossParallelLayoutError: the ranks tell different things, or the classes are not cut as ``torch.chunk`` does.
        Exception: what ``look`` and ``Seen.check`` raise, on any rank: of that type, with the rank in the message if
            others did not find the same.
    """
    if group is None or group.size == 1:
        seen = look(_said(num_classes, None))
        shard = ClassShard.of(seen.width if num_classes is None else num_classes, None)
    elif validate:
        seen, widths = _agreed(look, group, num_classes, like)
        shard = _said(num_classes, group) or _from_widths(widths, group)
    else:
        seen = look(_said(num_classes, group))
        shard = _said(num_classes, group) or _from_widths(
            gather_numbers([seen.width], group, like)[:, 0].tolist(), group
        )
    seen.check(shard)
    return shard


def _said(num_classes: int | None, group: Group | None) -> ClassShard | None:
    if num_classes is None:
        return None
    if index(num_classes) < 0:
        raise ValueError(f"num_classes is {num_classes}; expected 0 or more")
    return ClassShard.of(num_classes, group)


def _agreed(look: Look, group: Group, num_classes: int | None, like: Any) -> tuple[Seen, list[int]]:
    seen, text, failed = Seen(0), "", False
    try:
        seen = look(_said(num_classes, group))
        told = {**seen.shared, "the number of classes (num_classes)": num_classes}
        text = "\n".join(f"{name}\t{value!r}" for name, value in told.items())
    except Exception as error:  # whatever it is, the others wait
        text, failed = text_of(error), True
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    device = like if get_platform().is_tensor(like) else None
    headers = gather_numbers([failed, digest, seen.width], group, device)
    if headers[:, 0].any() or (headers[:, 1] != digest).any():
        raise _common_error(headers[:, 0].astype(bool).tolist(), gather_texts(text, group, device))
    return seen, headers[:, 2].tolist()


def _common_error(failed: Sequence[bool], texts: Sequence[str]) -> Exception:
    """The first rank's error, or the first thing that the ranks tell differently."""
    if any(failed):
        rank = failed.index(True)
        alike = all(failed) and len(set(texts)) == 1
        return error_of(texts[rank], "" if alike else f"on rank {rank} of the class group, ")
    first, *others = (dict(line.split("\t", 1) for line in text.split("\n") if "\t" in line) for text in texts)
    for name in dict.fromkeys(name for told in (first, *others) for name in told):
        for rank, told in enumerate(others, 1):
            if told.get(name) != first.get(name):
                return LossParallelLayoutError(
                    f"{name} differs between the ranks of the class group: {told.get(name)} on rank {rank}, "
                    f"{first.get(name)} on rank 0; expected the same on all ranks that share the classes"
                )
    return LossParallelLayoutError("the ranks of the class group disagree about the call")


def _from_widths(widths: list[int], group: Group) -> ClassShard:
    num_classes = sum(widths)
    wanted = tuple(stop - start for start, stop in chunk_ranges(num_classes, group.size))
    if tuple(widths) != wanted:
        raise LossParallelLayoutError(
            f"the ranks of the class group hold {tuple(widths)} of {num_classes} classes; expected {wanted}, as "
            "torch.chunk cuts them"
        )
    return ClassShard.of(num_classes, group)
