"""The header of a safetensors file, read without trusting it.

::

    8 bytes: N, little endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | the tensors, one after the other

Every number is checked against the file's size before anybody allocates memory by it. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CheckpointError

__all__ = [
    "DTYPES",
    "FileHeader",
    "TensorEntry",
    "encode_header",
    "file_identity",
    "open_regular_file",
    "read_header",
    "read_json",
]

MAX_HEADER_BYTES = 100_000_000
"""What the format allows."""

_LENGTH_BYTES = 8
_METADATA = "__metadata__"

DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""The format's dtype -> its name in NumPy's spelling, bytes of an element."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        name: its key.
        dtype: in NumPy's spelling: ``"float32"``, ``"bfloat16"``.
        shape: the whole tensor's.
        start: where its bytes begin in the file.
        item_bytes: bytes of an element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class FileHeader:
    """A checked header.

    Attributes:
        path: of the file.
        entries: the tensors by name, in the order of their bytes.
        metadata: the file's ``__metadata__``.
        header_bytes: length of all that comes before the tensors.
        file_bytes: length of the file.
        digest: of the header and the file's length; equal files have equal ones.
        identity: which file it was, in which state; see :func:`file_identity`.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    header_bytes: int
    file_bytes: int
    digest: str
    identity: tuple[int, ...]


def file_identity(descriptor: int) -> tuple[int, ...]:
    """Device, inode, length and time of the last change: different when a file was replaced or written to."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_regular_file(path: Path) -> int:
    """A descriptor for reading; a pipe or a device is refused instead of waited for.

    Raises:
        CheckpointError: there is none, it may not be read, or it is no ordinary file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot open {path}: {_reason(error)}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not an ordinary file")
    return descriptor


def read_header(path: Path) -> FileHeader:
    """Read and check the header of one file.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header is no header or lies about sizes or
            offsets; the message names the file, what was found and what was expected.
    """
    descriptor = open_regular_file(path)
    try:
        identity = file_identity(descriptor)
        size = os.fstat(descriptor).st_size
        prefix = _read(descriptor, 0, min(size, _LENGTH_BYTES), path)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES:
            raise CheckpointError(f"{path} is cut short: {size} bytes, expected at least {_LENGTH_BYTES}")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} announces a header of {length} bytes, expected at most {MAX_HEADER_BYTES}; "
                "is it a safetensors file?"
            )
        if length > size - _LENGTH_BYTES:
            raise CheckpointError(
                f"{path} is cut short: it announces a header of {length} bytes, but {size - _LENGTH_BYTES} are left"
            )
        text = _read(descriptor, _LENGTH_BYTES, length, path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from None
    finally:
        os.close(descriptor)
    content = read_json(text, f"the header of {path}")
    metadata = _check_metadata(content.pop(_METADATA, {}), path)
    start = _LENGTH_BYTES + length
    entries = [_check_entry(name, value, start, path) for name, value in content.items()]
    entries.sort(key=lambda e: (e.start, e.num_bytes))
    _check_offsets(entries, start, size, path)
    digest = hashlib.sha256(text + size.to_bytes(8, "little")).hexdigest()
    return FileHeader(path, {e.name: e for e in entries}, metadata, start, size, digest, identity)


def encode_header(entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the tensors, padded so that these begin at a multiple of 8.

    Args:
        entries: name -> (dtype in the format's spelling, shape), in the order of their bytes.
        metadata: the file's ``__metadata__``.
    """
    content: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in entries.items():
        stop = offset + math.prod(shape) * DTYPES[dtype][1]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object whose keys are all different.

    Raises:
        CheckpointError: something else.
    """
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except _DuplicateKey as error:
        raise CheckpointError(f"{what} names {error.args[0]!r} twice") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} is a JSON {type(content).__name__}, expected an object")
    return content


class _DuplicateKey(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return content


def _check_metadata(metadata: Any, path: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: {_METADATA} is not a mapping of strings to strings")
    return metadata


def _check_entry(name: str, value: Any, start: int, path: Path) -> TensorEntry:
    where = f"{path}, tensor {name[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {str(value)[:200]}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {str(dtype)[:50]!r}; expected one of {tuple(DTYPES)}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape {str(shape)[:200]}, expected a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {str(offsets)[:200]}, expected [begin, end]")
    numpy_name, item_bytes = DTYPES[dtype]
    entry = TensorEntry(name, numpy_name, tuple(shape), start + offsets[0], item_bytes)
    if entry.num_bytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: {dtype} of shape {shape} takes {entry.num_bytes} bytes, but data_offsets {offsets} hold "
            f"{offsets[1] - offsets[0]}"
        )
    return entry


def _are_sizes(values: Any) -> bool:
    # bool is an int to Python, and a file's integers have no limit
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_offsets(entries: list[TensorEntry], start: int, size: int, path: Path) -> None:
    """The tensors follow each other without gaps, from the header to the end of the file."""
    position = start
    for entry in entries:
        if entry.start != position:
            what = "overlaps the one before" if entry.start < position else "follows a hole"
            raise CheckpointError(
                f"{path}, tensor {entry.name!r} {what}: it begins at byte {entry.start - start} of the tensors, "
                f"expected {position - start}"
            )
        position += entry.num_bytes
    if position != size:
        what = "is cut short" if position > size else "is longer than its header says"
        raise CheckpointError(f"{path} {what}: {size} bytes, expected {position}")


def _read(descriptor: int, offset: int, length: int, path: Path) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(descriptor, length, offset)
        if not part:
            raise CheckpointError(f"{path} is cut short at byte {offset}")
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
