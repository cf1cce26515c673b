"""One decision on all ranks: what each rank found wrong, or sees differently, is known to all before any raises.

A rank that raised on its own would leave the others waiting in a collective. So before the collectives of a loss, every
rank sends a header of fixed size along each mesh dim. Only if something is wrong do the ranks exchange texts, and then
all raise the same error.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.exchange import gather_numbers, gather_texts
from hyper_parallel.errors import LossParallelLayoutError, LossParallelUnsupportedError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["View", "agree", "digest", "error_of", "text_of"]

_ERRORS: tuple[type[Exception], ...] = (
    LossParallelLayoutError,
    LossParallelUnsupportedError,
    IndexError,
    TypeError,
    ValueError,
    RuntimeError,
)


def text_of(error: Exception) -> str:
    """An error as text that other ranks can make it from; of an unusual type, as a RuntimeError."""
    code = next((i for i, kind in enumerate(_ERRORS) if isinstance(error, kind)), len(_ERRORS) - 1)
    return f"{code}|{error}"


def error_of(text: str, prefix: str = "") -> Exception:
    """The error that :func:`text_of` was given, ``prefix`` before its message."""
    code, message = text.split("|", 1)
    return _ERRORS[int(code)](prefix + message)


@dataclass(frozen=True)
class View:
    """What one rank sees of a call.

    Attributes:
        error: what is wrong with it here, to be raised on all ranks.
        shared: what all ranks of the mesh must see alike, as text.
        values: digest of values (the target's) that must be equal along the mesh dims of ``value_dims``.
        value_dims: mesh dims along which the target is replicated.
    """

    error: Exception | None
    shared: str
    values: int = 0
    value_dims: tuple[int, ...] = ()


def digest(array: np.ndarray) -> int:
    """A checksum of values and their order."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def agree(view: View, mesh: DeviceMesh, like: Tensor) -> Exception | None:
    """The error that all ranks of ``mesh`` must raise, or None when all is well everywhere.

    Collectives: one all-gather of 24 bytes along each mesh dim of more than one rank; on failure one of texts as well.
    """
    found = None if view.error is None else _Found(view.error, get_platform().rank(), everywhere=True)
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if group.size == 1:
            continue
        values = view.values if dim in view.value_dims else 0
        header = [found is not None, zlib.crc32(view.shared.encode()), values]
        seen = gather_numbers(header, group, like)
        if not seen[:, 0].any() and (seen == seen[0]).all():
            continue
        message = f"-|{view.shared}" if found is None else found.encode()
        found = _common_error(gather_texts(message, group, like), seen, group)
    if found is None:
        return None
    return found.error if found.everywhere else type(found.error)(f"rank {found.rank}: {found.error}")


@dataclass(frozen=True)
class _Found:
    """An error, the rank that found it, and whether all ranks that know of it found the same by themselves."""

    error: Exception
    rank: int
    everywhere: bool

    def encode(self) -> str:
        code = next((i for i, kind in enumerate(_ERRORS) if isinstance(self.error, kind)), len(_ERRORS) - 1)
        return f"{code}|{self.rank}|{self.everywhere:d}|{self.error}"

    @classmethod
    def decode(cls, text: str) -> _Found | None:
        if text.startswith("-|"):
            return None
        code, rank, everywhere, message = text.split("|", 3)
        return cls(_ERRORS[int(code)](message), int(rank), everywhere == "1")


def _common_error(texts: Sequence[str], seen: np.ndarray, group: Group) -> _Found:
    known = [_Found.decode(text) for text in texts]
    first = next((found for found in known if found is not None), None)
    if first is not None:
        everywhere = all(k is not None and k.everywhere and str(k.error) == str(first.error) for k in known)
        return _Found(first.error, first.rank, everywhere)
    return _Found(LossParallelLayoutError(_difference(texts, seen, group)), group.ranks[0], everywhere=True)


def _difference(texts: Sequence[str], seen: np.ndarray, group: Group) -> str:
    """What the ranks of a line of the mesh see differently."""
    views = [text.partition("|")[2] for text in texts]
    if len(set(views)) > 1:
        listed = "; ".join(f"rank {rank} has {view}" for rank, view in zip(group.ranks, views, strict=True))
        return f"the ranks of the mesh disagree about the call: {listed}"
    listed = ", ".join(f"{int(v):#010x} on rank {rank}" for rank, v in zip(group.ranks, seen[:, 2], strict=True))
    return (
        f"the target differs between ranks that must hold the same one (checksums: {listed}); expected equal targets "
        "on the ranks that share the classes of a token"
    )
