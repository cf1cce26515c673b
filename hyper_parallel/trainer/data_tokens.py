"""A data set as token ids."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["DataError", "Piece", "Tokens", "collect", "read_all"]


class DataError(ValueError):
    """The text cannot be used; the message names the file and says what is wrong with it."""


class Piece(NamedTuple):
    """Some ids of a document, ``[n]``; ``begins``: the first ones of it."""

    ids: np.ndarray
    begins: bool


@dataclass(frozen=True)
class Tokens:
    """Documents end to end.

    Attributes:
        ids: uint16 or uint32 ``[count]``, perhaps in a memory-mapped file.
        starts: int64 ``[documents]``, the index of each document's first id; ascending from 0.
        checksum: 32 bits that differ between different texts.
        highest: no id is larger.

    Example:
        >>> Tokens.of([np.array([5, 6]), np.array([7])]).starts
        array([0, 2])
    """

    ids: np.ndarray
    starts: np.ndarray
    checksum: int
    highest: int

    @classmethod
    def of(cls, documents: Iterable[np.ndarray], dtype: str = "<u4") -> Tokens:
        """Documents that are in memory."""
        return read_all((Piece(ids, True) for ids in documents), dtype)

    def part(self, first: int, stop: int) -> Tokens:
        """The ids ``first .. stop - 1``, without copying them; a document that is cut begins anew."""
        begin, end = np.searchsorted(self.starts, (first, stop), side="left")
        starts = self.starts[begin:end] - first
        if not len(starts) or starts[0] > 0:
            starts = np.insert(starts, 0, 0)
        checksum = zlib.crc32(f"{self.checksum} {first} {stop}".encode())
        return Tokens(self.ids[first:stop], starts, checksum, self.highest)


def collect(pieces: Iterable[Piece], dtype: str, write: Callable[[bytes], object]) -> tuple[array[int], int, int, int]:
    """Pass all ids on to ``write``, piece by piece.

    Returns:
        The starts of the documents, the number of ids, their checksum, and the largest.
    """
    starts, count, checksum, highest = array("q"), 0, 0, 0
    begins = True
    for piece in pieces:
        ids, begins = piece.ids, begins or piece.begins
        if len(ids):
            if begins:
                starts.append(count)
                begins = False
            content = ids.astype(dtype).tobytes()
            write(content)
            count, checksum, highest = count + len(ids), zlib.crc32(content, checksum), max(highest, int(ids.max()))
    return starts, count, zlib.crc32(starts.tobytes(), checksum), highest


def read_all(pieces: Iterable[Piece], dtype: str) -> Tokens:
    """All ids in memory."""
    parts: list[bytes] = []
    starts, _, checksum, highest = collect(pieces, dtype, parts.append)
    return Tokens(np.frombuffer(b"".join(parts), dtype), np.array(starts, np.int64), checksum, highest)
