"""Writing a checkpoint's files in parallel, block by block.

Every file has one writer. In each round every rank sends every writer its part of the block that this one is at, so
that nobody holds more than a few blocks of others, and every file is written from its beginning to its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.weights import BlockReader, get_weight_backend
from hyper_parallel.tensor_parallel.byte_runs import ByteRuns
from hyper_parallel.tensor_parallel.data_shards import local_part
from hyper_parallel.tensor_parallel.holders import Holders
from hyper_parallel.tensor_parallel.model_tensors import ModelTensor
from hyper_parallel.tensor_parallel.save_plan import PlannedFile, item_bytes, whole_bytes

__all__ = ["write_files"]

BLOCK_BYTES = 1 << 22
"""Written at once; a multiple of every element's size."""


@dataclass(frozen=True)
class _Block:
    """A part of a tensor in its file; ``file`` is set where a new file begins."""

    tensor: ModelTensor | None
    start: int = 0
    stop: int = 0
    file: PlannedFile | None = None
    ends: bool = False


_NOTHING = _Block(None)
_NO_RUNS = ByteRuns(*(np.empty(0, np.int64),) * 3)


def write_files(
    files: Sequence[PlannedFile], paths: Sequence[Path], save_id: str, holders: Holders, like: Tensor
) -> None:
    """Write all files; of the ``n`` holders, the ``i``-th writes every ``n``-th one from the ``i``-th on.

    Collectives: one all-to-all for each block of the writer that has most; none in a group of one.

    Args:
        files: what to write.
        paths: where each goes; nothing is there yet.
        save_id: for their headers.
        holders: the ranks that hold the model, and which of it.
        like: a tensor on the device that they communicate from.

    Raises:
        CheckpointError: this rank could not write. The others stop one round later, without an error.
    """
    group = holders.group
    sequences = [_blocks(files[writer :: group.size]) for writer in range(group.size)]
    own_paths = dict(zip((f.name for f in files), paths))
    pieces = _Pieces(holders)
    with _Writer(own_paths, save_id) as writer:
        for blocks in zip_longest(*sequences, fillvalue=_NOTHING):
            mine: _Block = blocks[group.rank]
            sent = [pieces.read(block, to) for to, block in enumerate(blocks)]
            runs = [pieces.runs(mine, rank, group.rank) for rank in range(group.size)]
            received = _exchange(sent, runs, writer.error is not None, group, like)
            if received is None:
                break
            writer.write(mine, list(zip(runs, received)))
    if writer.error is not None:
        raise CheckpointError(writer.error)


def _blocks(files: Sequence[PlannedFile]) -> Iterator[_Block]:
    for file in files:
        begins: PlannedFile | None = file
        for tensor in file.tensors:
            size = whole_bytes(tensor)
            step = _step(tensor)
            for start in range(0, size, step):
                stop = min(start + step, size)
                yield _Block(tensor, start, stop, begins, tensor is file.tensors[-1] and stop == size)
                begins = None
            if size == 0:
                yield _Block(tensor, 0, 0, begins, tensor is file.tensors[-1])
                begins = None


def _step(tensor: ModelTensor) -> int:
    """Blocks of whole rows where a row is small: the parts of the ranks interleave regularly then."""
    if tensor.spec.dim is None:
        return BLOCK_BYTES
    row = item_bytes(tensor) * int(np.prod(tensor.spec.shape[tensor.spec.dim :], dtype=np.int64))
    return BLOCK_BYTES // row * row if 0 < row <= BLOCK_BYTES else BLOCK_BYTES


class _Pieces:
    """Which bytes of a block each rank has, and this rank's."""

    def __init__(self, holders: Holders) -> None:
        self._group = holders.group
        self._readers: dict[int, BlockReader] = {}
        self._owned = lru_cache(maxsize=2 * holders.group.size)(holders.owned_runs)

    def runs(self, block: _Block, rank: int, writer: int) -> ByteRuns:
        """What ``rank`` sends to ``writer``. Of a tensor that is not cut every writer has the whole itself."""
        if block.tensor is None:
            return _NO_RUNS
        if block.tensor.spec.dim is None and block.tensor.piece is None:
            start, length = np.array([block.start]), np.array([block.stop - block.start])
            return ByteRuns(np.zeros(1, np.int64), start, length) if length[0] and rank == writer else _NO_RUNS
        return self._owned(block.tensor, rank).within(block.start, block.stop)

    def read(self, block: _Block, writer: int) -> np.ndarray:
        """This rank's bytes of a block, in the order of the file."""
        runs = self.runs(block, self._group.rank, writer)
        if not len(runs):
            return np.empty(0, np.uint8)
        assert block.tensor is not None
        reader = self._reader(block.tensor)
        joints = np.flatnonzero(runs.local[1:] != runs.local[:-1] + runs.length[:-1]) + 1
        bounds = [0, *joints.tolist(), len(runs)]
        parts = [
            reader.read(int(runs.local[a]), int(runs.local[b - 1] + runs.length[b - 1]))
            for a, b in zip(bounds, bounds[1:])
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _reader(self, tensor: ModelTensor) -> BlockReader:
        if id(tensor) not in self._readers:
            while len(self._readers) >= self._group.size:  # as many are in use at once; one may hold a copy
                self._readers.pop(next(iter(self._readers)))
            self._readers[id(tensor)] = get_weight_backend().reader(local_part(tensor.tensor))
        return self._readers[id(tensor)]


def _exchange(
    sent: Sequence[np.ndarray], runs: Sequence[ByteRuns], failed: bool, group: Group, like: Tensor
) -> Sequence[np.ndarray] | None:
    """Everybody's part of this rank's block; None when some rank has given up."""
    if group.size == 1:
        return None if failed else sent
    platform = get_platform()
    status = np.array([failed], np.uint8)  # the first byte of every message
    chunks = [platform.from_numpy(np.concatenate([status, piece]), like) for piece in sent]
    shapes = [(1 + r.total,) for r in runs]
    received = [platform.to_numpy(x) for x in platform.all_to_all_uneven(chunks, shapes, group)]
    return None if any(x[0] for x in received) else [x[1:] for x in received]


class _Writer:
    """This rank's files, one after the other. Errors are kept, so that no other rank waits for this one."""

    def __init__(self, paths: dict[str, Path], save_id: str) -> None:
        self._paths, self._save_id = paths, save_id
        self._file: BinaryIO | None = None
        self.error: str | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, block: _Block, parts: Sequence[tuple[ByteRuns, np.ndarray]]) -> None:
        if block.tensor is None or self.error is not None:
            return
        try:
            if block.file is not None:
                self._file = open(self._paths[block.file.name], "xb", buffering=0)
                _write_all(self._file, memoryview(block.file.header(self._save_id)))
            assert self._file is not None
            _write_all(self._file, _assemble(block, parts).data)
            if block.ends:
                os.fsync(self._file.fileno())
                self._file.close()
                self._file = None
        except OSError as error:
            path = error.filename or (self._file.name if self._file is not None else "the checkpoint")
            self.error = f"cannot write {path}: {error.strerror}"


def _assemble(block: _Block, parts: Sequence[tuple[ByteRuns, np.ndarray]]) -> np.ndarray:
    out = np.empty(block.stop - block.start, np.uint8)
    for runs, raw in parts:
        if len(runs) > 2 and _regular(runs):
            length, stride = int(runs.length[0]), int(runs.file[1] - runs.file[0])
            rows = np.lib.stride_tricks.as_strided(out[int(runs.file[0]) :], (len(runs), length), (stride, 1))
            rows[:] = raw.reshape(len(runs), length)
            continue
        position = 0
        for start, length in zip(runs.file.tolist(), runs.length.tolist()):
            out[start : start + length] = raw[position : position + length]
            position += length
    return out


def _regular(runs: ByteRuns) -> bool:
    steps = runs.file[1:] - runs.file[:-1]
    return bool((runs.length == runs.length[0]).all() and (steps == steps[0]).all())


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]
