"""Which files a Hugging Face checkpoint is made of, and which of them holds each tensor.

Three forms: a directory with ``model.safetensors.index.json`` that maps keys to files; one without, whose
``model.safetensors``, or else all ``*.safetensors``, count; a single file. An index may name only files of its own
directory (they may be links, as in Hugging Face's cache). Pickled weights (``*.bin``) are never read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor_parallel.safetensors_header import (
    FileHeader,
    TensorEntry,
    open_regular_file,
    read_header,
    read_json,
)

__all__ = [
    "INDEX_NAME",
    "SAVE_ID",
    "SINGLE_NAME",
    "Checkpoint",
    "StoredTensor",
    "is_checkpoint_file",
    "open_checkpoint",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SAVE_ID = "save_id"
"""Key of a file's metadata: files of one save have the same value, so that a mixture is noticed."""

_MAX_INDEX_BYTES = 100_000_000
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the file that holds it, as this was when its header was read."""

    path: Path
    entry: TensorEntry
    identity: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """What the headers say; no tensor has been read.

    Attributes:
        path: as the user gave it.
        tensors: by key.
        files: the headers of the files that count.
        stale: names of other safetensors files beside them.
        duplicated: keys that a second file of the checkpoint holds as well, with that file's name; the index says
            which one counts.
        digest: equal for equal checkpoints.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    files: tuple[FileHeader, ...]
    stale: tuple[str, ...]
    duplicated: tuple[tuple[str, str], ...]
    digest: str

    @property
    def header_bytes(self) -> int:
        """Bytes read so far, without the index."""
        return sum(header.header_bytes for header in self.files)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Find a checkpoint's files and read their headers. No collective.

    Args:
        path: a directory, or one file.

    Raises:
        CheckpointError: nothing there, no permission, an index that names what is not there or not in its directory,
            a damaged file, a key in several files without an index to choose, files of different saves.

    Example:
        >>> checkpoint = open_checkpoint("Llama-3.2-1B")                            # doctest: +SKIP
        >>> checkpoint.tensors["model.norm.weight"].entry.shape                     # doctest: +SKIP
        (2048,)
    """
    root = Path(path)
    weight_map: Mapping[str, str] | None = None
    if is_checkpoint_file(root):
        directory, names, stale = root.parent, [root.name], []
    else:
        directory = root
        found = _list_directory(root)
        if INDEX_NAME in found:
            weight_map = _read_index(root, found)
            names = sorted(set(weight_map.values()))
        elif SINGLE_NAME in found:
            names = [SINGLE_NAME]
        else:
            names = [name for name in found if name.endswith(_SUFFIX)]
        stale = [name for name in found if name.endswith(_SUFFIX) and name not in names]
        if not names:
            raise CheckpointError(_nothing(root, found))
    files = tuple(read_header(directory / name) for name in names)
    _check_one_save(files)
    tensors, duplicated = _collect(files, weight_map, root)
    digest = hashlib.sha256("".join(f"{h.path.name}:{h.digest};" for h in files).encode()).hexdigest()
    return Checkpoint(root, tensors, files, tuple(stale), duplicated, digest)


def is_checkpoint_file(path: Path) -> bool:
    """Whether ``path`` means one file and not a directory."""
    return path.suffix == _SUFFIX and not path.is_dir()


def _list_directory(root: Path) -> list[str]:
    try:
        # a leading dot marks files that a save has not finished
        return sorted(name for name in os.listdir(root) if not name.startswith("."))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot read the checkpoint directory {root}: {reason}") from None


def _read_index(root: Path, found: list[str]) -> Mapping[str, str]:
    path = root / INDEX_NAME
    descriptor = open_regular_file(path)
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(_MAX_INDEX_BYTES + 1)
    if len(text) > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{path} is longer than {_MAX_INDEX_BYTES} bytes")
    weight_map = read_json(text, str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: expected a 'weight_map' from tensor names to file names")
    if not weight_map:
        raise CheckpointError(f"{path}: the 'weight_map' is empty")
    for name in sorted(set(weight_map.values())):
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{path} names {name[:200]!r}, which is outside its directory; expected a plain file name"
            )
        if not name.endswith(_SUFFIX):
            raise CheckpointError(f"{path} names {name[:200]!r}; expected a *{_SUFFIX} file")
        if name not in found:
            raise CheckpointError(f"{path} names {name!r}, which is not there; expected {root / name}")
    return weight_map


def _collect(
    files: tuple[FileHeader, ...], weight_map: Mapping[str, str] | None, root: Path
) -> tuple[dict[str, StoredTensor], tuple[tuple[str, str], ...]]:
    tensors: dict[str, StoredTensor] = {}
    duplicated: list[tuple[str, str]] = []
    for header in files:
        for name, entry in header.entries.items():
            if weight_map is not None and weight_map.get(name, header.path.name) != header.path.name:
                duplicated.append((name, header.path.name))
            elif name in tensors:
                raise CheckpointError(
                    f"{root}: {name!r} is in {tensors[name].path.name} and in {header.path.name}, and no index says "
                    "which one counts"
                )
            else:
                tensors[name] = StoredTensor(header.path, entry, header.identity)
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{root / INDEX_NAME} says that {name!r} is in {file}, but it is not")
    return tensors, tuple(duplicated)


def _check_one_save(files: tuple[FileHeader, ...]) -> None:
    first = files[0]
    for header in files:
        if header.metadata.get(SAVE_ID) != first.metadata.get(SAVE_ID):
            raise CheckpointError(
                f"{first.path} and {header.path.name} come from different saves; one was interrupted, or its files "
                "were mixed with others"
            )


def _nothing(root: Path, found: list[str]) -> str:
    pickled = [name for name in found if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        return (
            f"{root} holds no safetensors files, only {', '.join(pickled[:3])}: pickled weights are not read, because "
            "reading them can run code; convert them to safetensors first"
        )
    return f"{root} holds no checkpoint: expected {INDEX_NAME}, {SINGLE_NAME} or other *{_SUFFIX} files"
