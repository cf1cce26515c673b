"""Checkpoint files made by hand, whole ones and damaged ones, with NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_NAMES = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "uint16": "BF16", "bool": "BOOL"}
"""uint16 arrays stand for bfloat16."""


def raw_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header (JSON of `header`, or bytes as they are), which may announce another length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def file_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """A proper file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in tensors.items():
        stop = offset + array.nbytes
        entry = {"dtype": FORMAT_NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, stop]}
        header[name] = entry
        offset = stop
    return raw_file(header, b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values()))


def write_checkpoint(
    directory: Path, tensors: Mapping[str, np.ndarray], files: int = 1, metadata: Mapping[str, str] | None = None
) -> Path:
    """A checkpoint of one file, or of several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    if files == 1:
        (directory / "model.safetensors").write_bytes(file_bytes(tensors, metadata))
        return directory
    names = [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
    place = {key: names[i % files] for i, key in enumerate(tensors)}
    for name in names:
        own = {key: array for key, array in tensors.items() if place[key] == name}
        (directory / name).write_bytes(file_bytes(own, metadata))
    write_index(directory, place)
    return directory


def write_index(directory: Path, place: Any) -> None:
    """An index that says anything."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 values (ties to even), as uint16."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 values."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(tuple(shape), np.float32) for name, shape in shapes.items()}
