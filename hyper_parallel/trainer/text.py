"""Text as bytes: which files belong to a data set, and the tokenizer that needs nothing."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hyper_parallel.trainer.data_tokens import DataError
from hyper_parallel.trainer.output_folder import what_is_written

__all__ = ["ByteTokenizer", "find_files"]

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_PEEK = 8192


class ByteTokenizer:
    """A token is a byte; three specials follow the 256 bytes.

    Example:
        >>> ByteTokenizer.decode(ByteTokenizer.encode("hé"))
        'hé'
    """

    bos_id = 256
    """Begins a document."""

    eos_id = 257
    """Ends a document."""

    pad_id = 258
    """Fills what a document leaves empty; never a target."""

    vocab_size = 259

    identity = "bytes"
    """Tells tokenizers apart that give other ids."""

    @classmethod
    def encode(cls, text: str) -> np.ndarray:
        """uint16 ids of the text's UTF-8 bytes, without specials."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    @classmethod
    def encode_batch(cls, contents: Sequence[bytes]) -> list[np.ndarray]:
        """uint8 ids of each content, without specials."""
        return [np.frombuffer(content, np.uint8) for content in contents]

    @classmethod
    def encode_document(cls, content: bytes) -> np.ndarray:
        """uint16 ids between ``bos_id`` and ``eos_id``."""
        ids = np.empty(len(content) + 2, np.uint16)
        ids[0], ids[-1] = cls.bos_id, cls.eos_id
        ids[1:-1] = np.frombuffer(content, np.uint8)
        return ids

    @classmethod
    def decode(cls, ids: np.ndarray) -> str:
        """The text, without specials; bytes that are not UTF-8 become replacement characters."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")


def find_files(path: Path | None, left_out: Sequence[Path] = (), written: list[Path] | None = None) -> list[Path]:
    """The files of a data set, in an order that is the same everywhere.

    Args:
        path: a file; or a folder, whose text files are taken at any depth (hidden ones and those with a zero
            byte near the beginning are left out); or None for the source of Python's standard library.
        left_out: folders that do not belong to it, though they may lie in it.
        written: gets those that are left out besides, since commands have written into them: output folders, kept token
            ids, checkpoints, models.

    Raises:
        FileNotFoundError: there is no such path, or nothing in it.
        DataError: the path is itself such a folder.
    """
    elsewhere = frozenset(os.path.realpath(folder) for folder in left_out)
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [f for f in _walk(root, _NOT_THE_LIBRARY) if f.suffix == ".py"]
    elif path.is_dir():
        root = path
        if kind := what_is_written(root, os.listdir(root)):
            raise DataError(f"{root} holds {kind}, and no text; name the folder that the text is in, or a file")
        written = [] if written is None else written
        found = [f for f in _walk(root, frozenset({"__pycache__"}), elsewhere, written) if not _is_binary(f)]
        written.sort()
    elif path.is_file():
        return [path]
    else:
        raise FileNotFoundError(f"no data at {path}: expected a file or a folder of text")
    if not found:
        raise FileNotFoundError(f"no text files in {root}")
    return sorted(found, key=lambda f: f.relative_to(root).as_posix())


def _walk(
    root: Path,
    names_left_out: frozenset[str],
    elsewhere: frozenset[str] = frozenset(),
    written: list[Path] | None = None,
) -> Iterator[Path]:
    """The files; ``written`` gets folders that are not entered because of what they hold."""
    for folder, subfolders, names in os.walk(root):
        if written is not None and what_is_written(Path(folder), names):
            written.append(Path(folder))
            subfolders.clear()
            continue
        place = os.path.realpath(folder)
        subfolders[:] = [
            s
            for s in subfolders
            if s not in names_left_out and not s.startswith(".") and os.path.join(place, s) not in elsewhere
        ]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _is_binary(file: Path) -> bool:
    with open(file, "rb") as stream:
        return b"\0" in stream.read(_PEEK)
