"""Bytes of tensors in safetensors files: read run by run into a small buffer, nothing stays mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor_parallel.byte_runs import ByteRuns, box_runs
from hyper_parallel.tensor_parallel.checkpoint_files import Checkpoint, StoredTensor
from hyper_parallel.tensor_parallel.safetensors_header import TensorEntry, file_identity, open_regular_file

__all__ = ["FileReader", "TensorSlice", "equal_runs", "get_slice"]

BLOCK_BYTES = 1 << 22
"""Read at once; a multiple of every element's size."""

Sink = Callable[[int, np.ndarray], None]
"""Takes a position in the piece, in bytes, and the bytes there; these are valid during the call only."""


class FileReader:
    """Open files of one checkpoint, and a count of the bytes read."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, stored: StoredTensor, runs: ByteRuns, sink: Sink) -> None:
        """Give ``sink`` the bytes of ``runs``, in their order, in blocks.

        Raises:
            CheckpointError: the file cannot be read, or is not the one any more whose header was read.
        """
        position = filled = 0
        view = self._buffer.data
        descriptor = self._open(stored)
        for file, length in zip(runs.file.tolist(), runs.length.tolist()):
            offset = stored.entry.start + file
            while length:
                part = min(length, BLOCK_BYTES - filled)
                _read_exactly(descriptor, view[filled : filled + part], offset, stored.path)
                offset, length, filled = offset + part, length - part, filled + part
                if filled == BLOCK_BYTES:
                    sink(position, self._buffer)
                    position, filled = position + filled, 0
        if filled:
            sink(position, self._buffer[:filled])
        self.bytes_read += position + filled

    def _open(self, stored: StoredTensor) -> int:
        if stored.path not in self._descriptors:
            descriptor = self._descriptors[stored.path] = open_regular_file(stored.path)
            if file_identity(descriptor) != stored.identity:
                raise CheckpointError(f"{stored.path} has changed since its header was read")
        return self._descriptors[stored.path]


class TensorSlice:
    """A tensor in a file, to be sliced like ``safetensors``' ``get_slice()``: what a :class:`ShardLoader` reads from.

    Slices are arrays of their own (``bfloat16`` as ``float32``); only the bytes asked for are read. Slices outside
    the tensor are errors.

    Example:
        >>> rows = get_slice(open_checkpoint("model"), "lm_head.weight")[0:1000]             # doctest: +SKIP
    """

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self._stored.entry.shape)

    def get_dtype(self) -> str:
        """In NumPy's spelling."""
        return self._stored.entry.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        entry = self._stored.entry
        bounds = _bounds(index, entry)
        out = np.empty(int(np.prod([b - a for a, b in bounds], dtype=np.int64)) * entry.item_bytes, np.uint8)

        def keep(position: int, block: np.ndarray) -> None:
            out[position : position + len(block)] = block

        with FileReader() as reader:
            reader.read(self._stored, box_runs(entry.shape, bounds, entry.item_bytes), keep)
        return _as_numpy(out, entry.dtype).reshape([b - a for a, b in bounds])


def get_slice(checkpoint: Checkpoint, key: str) -> TensorSlice:
    """The tensor ``key``, to be sliced.

    Raises:
        CheckpointError: there is none.
    """
    if key not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path} has no tensor {key!r}")
    return TensorSlice(checkpoint.tensors[key])


def equal_runs(first: StoredTensor, second: StoredTensor, runs: ByteRuns) -> bool:
    """Whether the same runs of two stored tensors have the same bytes."""
    one, two = first.entry, second.entry
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    with FileReader() as a, FileReader() as b:
        return all(np.array_equal(_block(a, first, p), _block(b, second, p)) for p in _parts(runs))


def _parts(runs: ByteRuns) -> Iterator[ByteRuns]:
    """The runs in portions that fit the buffer."""
    for file, length in zip(runs.file.tolist(), runs.length.tolist()):
        for start in range(0, length, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, length)
            yield ByteRuns(np.array([file + start]), np.zeros(1, np.int64), np.array([stop - start]))


def _block(reader: FileReader, stored: StoredTensor, part: ByteRuns) -> np.ndarray:
    blocks: list[np.ndarray] = []
    reader.read(stored, part, lambda _, block: blocks.append(block))
    return blocks[0]  # a part fits one block, which is the reader's own until it reads again


def _read_exactly(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(f"{path} has become shorter: it ends before byte {offset + len(target)}")
        done += count


def _bounds(index: Any, entry: TensorEntry) -> list[tuple[int, int]]:
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = index[:at] + (slice(None),) * (len(entry.shape) - len(index) + 1) + index[at + 1 :]
    if len(index) > len(entry.shape) or not all(isinstance(i, slice) and i.step in (None, 1) for i in index):
        raise CheckpointError(f"{entry.name}: cannot take {index} of shape {entry.shape}; expected slices of step 1")
    index += (slice(None),) * (len(entry.shape) - len(index))
    return [_bound(i, size, entry) for i, size in zip(index, entry.shape)]


def _bound(index: slice, size: int, entry: TensorEntry) -> tuple[int, int]:
    start = 0 if index.start is None else index.start
    stop = size if index.stop is None else index.stop
    if not 0 <= start <= stop <= size:
        raise CheckpointError(f"{entry.name}: [{start}, {stop}) is outside a dim of size {size} of {entry.shape}")
    return start, stop


def _as_numpy(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        raise CheckpointError(f"NumPy has no {dtype}")
    return raw.view(np.dtype(dtype))
