"""One decision on all ranks of a group: what one of them found wrong, all raise."""

from __future__ import annotations

import zlib

from hyper_parallel.core.exchange import gather_numbers, gather_texts
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform import Group
from hyper_parallel.platform.platform import Tensor

__all__ = ["raise_together"]


def raise_together(
    error: Exception | None, view: str, group: Group, like: Tensor | None = None, values: int = 0
) -> bool:
    """Return on all ranks, or raise on all: where some rank has an error, or the ranks see different things.

    Collectives: one all-gather of 24 bytes; one of texts when something is wrong.

    Args:
        error: what is wrong here; raised as it is on this rank.
        view: what must be the same everywhere.
        group: the ranks.
        like: a tensor on the device that the group communicates from; None: the host.
        values: a number that may differ.

    Returns:
        Whether ``values`` is the same everywhere.

    Raises:
        ParallelPlanError: some other rank's error, or different views.
    """
    seen = gather_numbers([error is not None, zlib.crc32(view.encode()), values], group, like)
    if not seen[:, 0].any() and (seen[:, 1] == seen[0, 1]).all():
        return bool((seen[:, 2] == seen[0, 2]).all())
    texts = gather_texts(view if error is None else str(error), group, like)
    if error is not None:
        raise error
    for failed, rank, found in zip(seen[:, 0], group.ranks, texts):
        if failed:
            raise ParallelPlanError(f"rank {rank}: {found}")
    differing = next(i for i, found in enumerate(texts) if found != texts[0] or seen[i, 1] != seen[0, 1])
    raise ParallelPlanError(
        f"ranks {group.ranks[0]} and {group.ranks[differing]} have different models or plans: "
        f"{_first_difference(texts[0], texts[differing])}"
    )


def _first_difference(one: str, other: str) -> str:
    for a, b in zip(one.split("\n"), other.split("\n")):
        if a != b:
            return f"{a!r} and {b!r}"
    return f"{len(one)} and {len(other)} characters of description"
