"""One error on all ranks, in the middle of a step: what one of them found wrong with what it was given, all raise,
before anybody waits for it in a collective.
"""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Sequence

from hyper_parallel import errors
from hyper_parallel.core.exchange import gather_numbers, gather_texts
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["raise_alike"]


@get_platform().opaque
def raise_alike(
    error: Exception | None, view: str, expected: str, groups: Sequence[Group], like: Tensor, where: str
) -> None:
    """Return on all ranks, or raise on all: where some rank has an error, or the ranks see different things.

    Collectives: on CPU one all-gather of 16 bytes in each group of several ranks, and one of texts when something is
    wrong. On accelerators none, as the host would wait for it: there a rank raises its own error alone.

    Args:
        error: what is wrong here.
        view: what must be the same everywhere.
        expected: what of it, in words.
        groups: the ranks: of each of several groups, in an order that is the same on all.
        like: a tensor on the device that they communicate from.
        where: the module or function, for messages.

    Raises:
        The error of the first rank that has one, with that rank's name where others have none.
        ValueError: different views, with what every rank has.
    """
    groups = [group for group in groups if group.size > 1]
    told = False  # by the ranks of an earlier group
    if groups and get_platform().loss_kernels.validates_by_default(like):
        for group in groups:
            seen = gather_numbers([error is not None, zlib.crc32(view.encode())], group, like)
            if not seen[:, 0].any() and (seen[:, 1] == seen[0, 1]).all():
                continue
            text = f"\n{view}" if error is None else f"{type(error).__name__}\n{error}"
            texts = gather_texts(text, group, like)
            error, told = _first(texts, group, error, f"{where}: the ranks differ: ", expected, told), True
    if error is not None:
        raise error


def _first(
    texts: list[str], group: Group, own: Exception | None, differ: str, expected: str, told: bool
) -> Exception:
    parts = [text.split("\n", 1) for text in texts]
    failed = next((i for i, (kind, _) in enumerate(parts) if kind), None)
    if failed is None:
        held = ", ".join(f"{view} on rank {rank}" for (_, view), rank in zip(parts, group.ranks))
        return ValueError(f"{differ}{held}; expected {expected}")
    kind, message = parts[failed]
    if own is not None and all(text == texts[failed] for text in texts):
        return own
    known = getattr(builtins, kind, None) or getattr(errors, kind, None)
    made = known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError
    return made(message if told else f"rank {group.ranks[failed]}: {message}")
