"""Where the bytes lie in a file of what a rank holds of a tensor.

A tensor in a file is one row-major block, so a piece of it is a sequence of contiguous runs: one run where dim 0 is
cut, one for each row where dim 1 is. In the order of the runs here, the piece itself is row-major.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.tensor_parallel.cuts import range_replicas

__all__ = ["ByteRuns", "box_runs", "owned_runs", "spec_runs", "uncovered_elements"]


@dataclass(frozen=True, eq=False)
class ByteRuns:
    """Contiguous runs of bytes.

    Attributes:
        file: where each run begins, in bytes from the tensor's beginning in the file.
        local: where it begins in the rank's own row-major piece.
        length: how long it is; never 0.
    """

    file: np.ndarray
    local: np.ndarray
    length: np.ndarray

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.file)

    def within(self, start: int, stop: int) -> ByteRuns:
        """The parts of the runs in the file's ``[start, stop)``, with ``file`` counted from ``start``.

        The runs must be sorted by ``file``.
        """
        first = int(np.searchsorted(self.file + self.length, start, "right"))
        last = max(int(np.searchsorted(self.file, stop, "left")), first)
        begin, end = self.file[first:last], self.file[first:last] + self.length[first:last]
        low, high = np.maximum(begin, start), np.minimum(end, stop)
        return ByteRuns(low - start, self.local[first:last] + low - begin, high - low)

    def of_part(self, start: int, stop: int) -> ByteRuns:
        """What lies in bytes ``[start, stop)`` of the rank's piece, with ``local`` counted from ``start``. The order
        stays.

        Example:
            >>> runs = spec_runs(ShardSpec.chunk((2, 6), 1, 2), 1, 4).of_part(12, 24)     # of two rows the second
            >>> runs.file.tolist(), runs.local.tolist(), runs.length.tolist()
            ([36], [0], [12])
        """
        low = np.maximum(self.local, start)
        length = np.minimum(self.local + self.length, stop) - low
        there = length > 0
        return ByteRuns((self.file + low - self.local)[there], (low - start)[there], length[there])


def spec_runs(spec: ShardSpec, rank: int, item_bytes: int) -> ByteRuns:
    """The runs of what ``rank`` holds, in the order of its own piece.

    Example:
        >>> runs = spec_runs(ShardSpec.chunk((2, 6), 1, 2), 1, 4)     # columns 3 .. 5 of two rows, 4 bytes each
        >>> runs.file.tolist(), runs.length.tolist()
        ([12, 36], [12, 12])
    """
    file, length = _row_runs(spec, rank, item_bytes)
    return _merged(file.reshape(-1), length.reshape(-1))


def owned_runs(spec: ShardSpec, rank: int, item_bytes: int) -> ByteRuns:
    """The runs that ``rank`` holds as the first of their replicas, sorted by their place in the file.

    Over all ranks they cover the tensor once. A tensor that is not cut belongs to rank 0.
    """
    file, length = _row_runs(spec, rank, item_bytes)
    local = (np.cumsum(length) - length.reshape(-1)).reshape(length.shape)
    replicas = range_replicas(spec, rank) or ((0,),)
    own = np.array([members[0] == rank for members in replicas], bool)
    file, length, local = (a[:, own].reshape(-1) for a in (file, length, local))
    order = np.argsort(file[length > 0], kind="stable")
    return ByteRuns(*(a[length > 0][order] for a in (file, local, length)))


def box_runs(shape: Sequence[int], bounds: Sequence[tuple[int, int]], item_bytes: int) -> ByteRuns:
    """The runs of a box ``[start, stop)`` in every dim, in row-major order."""
    offsets = np.zeros(1, np.int64)
    stride = math.prod(shape)
    run = item_bytes
    last = max((d for d, (size, b) in enumerate(zip(shape, bounds)) if b != (0, size)), default=-1)
    for dim, (size, (start, stop)) in enumerate(zip(shape, bounds)):
        stride = stride // size if size else 0
        if dim < last:  # one run, or several, for each index
            index = np.arange(start, stop, dtype=np.int64)
            offsets = (offsets[:, None] + index[None, :] * stride).reshape(-1)
        elif dim == last:
            offsets = offsets + start * stride
        if dim >= last:
            run *= stop - start
    return _merged(offsets * item_bytes, np.full(offsets.shape, run, np.int64))


def uncovered_elements(spec: ShardSpec) -> int:
    """How many elements of the whole are in no rank's part."""
    if spec.dim is None:
        return 0
    seen = np.zeros(spec.shape[spec.dim], bool)
    for ranges in spec.ranges:
        for start, stop in ranges:
            seen[start:stop] = True
    others = math.prod(size for dim, size in enumerate(spec.shape) if dim != spec.dim)
    return int((~seen).sum()) * others


def _row_runs(spec: ShardSpec, rank: int, item_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Beginnings and lengths ``[rows, ranges]``, a row being what lies behind one index of the dims before the cut."""
    if spec.dim is None:
        size = np.array([[math.prod(spec.shape) * item_bytes]], np.int64)
        return np.zeros_like(size), size
    rows = math.prod(spec.shape[: spec.dim])
    inner = math.prod(spec.shape[spec.dim + 1 :]) * item_bytes
    ranges = np.array(spec.ranges[rank], np.int64).reshape(-1, 2) * inner
    row = np.arange(rows, dtype=np.int64) * (spec.shape[spec.dim] * inner)
    file = row[:, None] + ranges[None, :, 0]
    length = np.broadcast_to(ranges[:, 1] - ranges[:, 0], file.shape)
    return file, np.ascontiguousarray(length)


def _merged(file: np.ndarray, length: np.ndarray) -> ByteRuns:
    """Join runs that follow each other, drop empty ones."""
    file, length = file[length > 0], length[length > 0]
    if not len(file):
        return ByteRuns(file, file, length)
    first = np.concatenate([[True], file[1:] != file[:-1] + length[:-1]])
    begin = np.flatnonzero(first)
    joined = np.add.reduceat(length, begin)
    return ByteRuns(file[begin], np.cumsum(joined) - joined, joined)
