"""Plain tensors that are sharded over a dim. They do not know how long it is on all ranks together: each rank has to
hold as much of it as this one, or what the caller says. Whether that is so is asked where a collective is about to take
it for granted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from hyper_parallel.core.exchange import gather_numbers, gather_texts
from hyper_parallel.core.placement_types import Placement, Shard
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["DTENSOR_SAYS", "Sizes", "check_dim", "ensure_even", "pieces"]

DTENSOR_SAYS = "as a DTensor that knows its whole shape, DTensor.from_local(..., shape=...)"

Sizes = int | Sequence[int] | None
"""Of a sharded dim: of all ranks together, of each rank, or the same on every rank."""

_opaque = get_platform().opaque


def check_dim(placement: Placement, shape: tuple[int, ...], where: str, what: str = "activation") -> None:
    """Whether a tensor of ``shape`` can lie so. No collective: what ranks hold has as many dims on each.

    Raises:
        IndexError: a dim that it does not have.
    """
    if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
        expected = f"a dim from {-len(shape)} to {len(shape) - 1}" if shape else "Replicate()"
        raise IndexError(f"{where}: found {placement!r} for an {what} of shape {shape}; expected {expected}")


@_opaque
def ensure_even(
    x: Tensor, dim: int | None, group: Group, where: str, say: str = DTENSOR_SAYS, told: Sizes = None
) -> None:
    """Return on all ranks where each holds its piece of ``x``, or raise on all.

    Collectives: on CPU one all-gather of 16 bytes, and one of texts when something is wrong. On accelerators none: the
    host would wait for it, and the lengths are taken as they are here.

    Args:
        x: a plain local tensor.
        dim: the dim that is sharded; None: all ranks hold the whole of ``x``.
        group: the ranks.
        where: the module or function, for messages.
        say: how a length is told that is not the same everywhere; ``{size}`` stands for the
            length of all together, ``{lengths}`` for that of each, where pieces of any length are taken.
        told: the length of all together, or that of each; None: all pieces are of one length.

    Raises:
        ValueError: tensors of different shapes or dtypes, or pieces of other lengths, with what every rank holds and
            what was expected.
    """
    platform = get_platform()
    if group.size == 1 or not platform.loss_kernels.validates_by_default(x):
        return
    shape = platform.shape(x)
    sharded = None if dim is None or not -len(shape) <= dim < len(shape) else dim % len(shape)
    alike = (platform.dtype_name(x), told, *("*" if d == sharded else size for d, size in enumerate(shape)))
    seen = gather_numbers([zlib.crc32(repr(alike).encode()), -1 if sharded is None else shape[sharded]], group, x)
    lengths = tuple(int(length) for length in seen[:, 1])
    expected = lengths[:1] * group.size if told is None or sharded is None else pieces(told, group.size)
    same = bool((seen[:, 0] == seen[0, 0]).all())
    if same and lengths == expected:
        return
    texts = gather_texts(f"{platform.dtype_name(x)} {shape}{'' if told is None else f' of {told}'}", group, x)
    if not same:
        held = ", ".join(f"{text} on rank {rank}" for text, rank in zip(texts, group.ranks))
        rest = "" if dim is None else f" but for dim {dim}, which is sharded"
        raise ValueError(f"{where}: the ranks hold different tensors: {held}; expected equal shapes and dtypes{rest}")
    held = ", ".join(f"{length} on rank {rank}" for length, rank in zip(lengths, group.ranks))
    if told is not None:
        raise ValueError(
            f"{where}: dim {sharded} of a plain tensor is sharded as {held}; expected {expected}, the pieces of {told}"
        )
    raise ValueError(
        f"{where}: dim {sharded} of a plain tensor is sharded unevenly: {held}; expected as many elements on every "
        f"rank. {_told(lengths, say)}"
    )


def pieces(told: int | Sequence[int], ranks: int) -> tuple[int, ...]:
    """The length of each rank's piece: as ``torch.chunk`` cuts a length, or as told one by one."""
    if isinstance(told, int):
        return tuple(stop - start for start, stop in chunk_ranges(told, ranks))
    return tuple(told)


def _told(lengths: tuple[int, ...], say: str) -> str:
    size = sum(lengths)
    chunks = pieces(size, len(lengths))
    how = f"Where that cannot be, say how long it is: {say.format(size=size, lengths=lengths)}"
    if lengths == chunks or "{lengths}" in say:
        return how
    return f"{how}, with pieces of {chunks}, as torch.chunk cuts {size}"
