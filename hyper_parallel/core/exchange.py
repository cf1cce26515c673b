"""Small facts between the ranks of a group: numbers, and texts for error messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["gather_numbers", "gather_texts"]

_TEXT_BYTES = 8192


def gather_numbers(numbers: Sequence[int] | np.ndarray, group: Group, like: Tensor | None = None) -> np.ndarray:
    """Everybody's numbers, int64 ``[ranks, n]``; all ranks give as many.

    Collectives: one all-gather; none in a group of one.

    Args:
        numbers: this rank's.
        group: the ranks.
        like: a tensor on the device that the group communicates from; None: the host.
    """
    own = np.asarray(numbers, np.int64)
    if group.size == 1:
        return own[None]
    platform = get_platform()
    gathered: np.ndarray = platform.to_numpy(platform.all_gather(platform.from_numpy(own, like), group))
    return gathered


def gather_texts(text: str, group: Group, like: Tensor | None = None) -> list[str]:
    """Everybody's texts, of which more than 8192 bytes are cut off.

    Collectives: one all-gather of 8192 bytes; none in a group of one.
    """
    raw = text.encode(errors="replace")[:_TEXT_BYTES]
    rows = gather_numbers(np.frombuffer(raw.ljust(_TEXT_BYTES, b"\0"), np.int64), group, like)
    return [row.astype(np.int64).tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
