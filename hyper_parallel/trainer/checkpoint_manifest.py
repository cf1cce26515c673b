"""The list of a checkpoint's files with their sizes and checksums: what makes it whole, and shows when it is not."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor_parallel.safetensors_header import open_regular_file, read_json

__all__ = ["MANIFEST_FILE", "FileFacts", "Manifest", "read_small_json", "write_text"]

MANIFEST_FILE = "manifest.json"
FORMAT = "hyper_parallel training checkpoint"
VERSION = 1

_MAX_BYTES = 1 << 30
_BLOCK = 1 << 22
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class FileFacts:
    """Length and SHA-256 of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Read the whole file.

        Raises:
            CheckpointError: it cannot be read.
        """
        digest, length = hashlib.sha256(), 0
        with os.fdopen(open_regular_file(path), "rb", buffering=0) as file:
            try:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    length += len(block)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        return cls(length, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint but this list itself, by their paths in its folder."""

    step: int
    files: Mapping[str, FileFacts]

    @property
    def digest(self) -> str:
        """Of all that it says."""
        return hashlib.sha256(_encode(self._content()).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        files = {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())}
        return {"format": FORMAT, "version": VERSION, "step": self.step, "files": files}

    def write(self, folder: Path) -> None:
        """As the last file of a checkpoint, on the disk. Raises OSError."""
        write_text(folder / MANIFEST_FILE, _encode({**self._content(), "sha256": self.digest}))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the list; looks at no other file.

        Raises:
            CheckpointError: it is not there, damaged, of another version, or names files outside the folder.
        """
        path = folder / MANIFEST_FILE
        content = read_small_json(path)
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {content.get('format')!r}; expected {FORMAT!r}")
        if content.get("version") != VERSION:
            raise CheckpointError(f"{path} has version {content.get('version')!r}; this library reads {VERSION}")
        try:
            files = {str(name): FileFacts(int(f["bytes"]), str(f["sha256"])) for name, f in content["files"].items()}
            manifest = cls(int(content["step"]), files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from None
        if content.get("sha256") != manifest.digest:
            raise CheckpointError(f"{path} is damaged: its own checksum is {manifest.digest}, not what it says")
        for name in files:
            if not _NAME.fullmatch(name):
                raise CheckpointError(f"{path} names {name[:200]!r}, which is no file of a checkpoint")
        return manifest

    def check_sizes(self, folder: Path) -> None:
        """Compare what is there with the list, without reading any content.

        Raises:
            CheckpointError: a file is missing, too many, or of another length.
        """
        for name, facts in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError as error:
                raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from None
            if size != facts.bytes:
                what = "cut short" if size < facts.bytes else "too long"
                raise CheckpointError(f"{folder / name} is {what}: {size} bytes, expected {facts.bytes}")
        # A file that nobody has written could take the place of one that somebody has.
        for place in sorted({(folder / name).parent for name in self.files}):
            for path in sorted(place.iterdir()):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and not path.name.startswith(".") and name not in {*self.files, MANIFEST_FILE}:
                    raise CheckpointError(f"{path} is not part of the checkpoint; remove it")

    def check_content(self, folder: Path, names: Iterable[str]) -> None:
        """Read some files whole.

        Raises:
            CheckpointError: one has another content than when it was written.
        """
        for name in names:
            found, expected = FileFacts.of(folder / name), self.files[name]
            if found != expected:
                raise CheckpointError(
                    f"{folder / name} is damaged: {found.bytes} bytes with SHA-256 {found.sha256[:16]}…, expected "
                    f"{expected.bytes} with {expected.sha256[:16]}…"
                )


def read_small_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: there is none.
    """
    with os.fdopen(open_regular_file(path), "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise CheckpointError(f"{path} is longer than {_MAX_BYTES} bytes")
    return read_json(text, str(path))


def write_text(path: Path, text: str) -> None:
    """A new file, on the disk when this returns. Raises OSError."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _encode(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"
