"""Token ids in files: text is read and encoded once, and afterwards mapped into memory, never loaded whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hyper_parallel.trainer.data_files import encode_files
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.data_tokens import DataError, Piece, Tokens, collect, read_all
from hyper_parallel.trainer.output_folder import MARK
from hyper_parallel.trainer.text import find_files
from hyper_parallel.trainer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["open_tokens"]

_VERSION = 1
"""Of the files' format and of what reading does; another one makes them anew."""


def open_tokens(
    path: Path | None,
    options: TextOptions,
    cache: Path | None = None,
    left_out: Sequence[Path] = (),
    written: list[Path] | None = None,
) -> Tokens:
    """The token ids of a data set.

    With ``cache`` they are kept there, in files named after a fingerprint of the text's files (names, sizes, times),
    the tokenizer and the options. Several processes may ask at once: one reads, the others wait for it.

    Args:
        path: what :func:`~hyper_parallel.trainer.text.find_files` takes.
        options: how to read it.
        cache: a folder, made when missing, and no part of the data set; None: in memory.
        left_out: folders that are no part of the data set either.
        written: gets those that are none since commands have written into them.

    Raises:
        FileNotFoundError: there is no such path, or nothing in it.
        DataError: the text or the tokenizer cannot be used.
        OSError: a file cannot be read or written.
    """
    files = find_files(path, [*left_out, *([] if cache is None else [cache])], written)
    tokenizer = load_tokenizer(options)
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    if cache is None:
        found = read_all(_pieces(files, options, tokenizer), dtype)
        if not len(found.ids):
            raise _nothing(path)
        return found
    cache.mkdir(parents=True, exist_ok=True)
    entry = _Entry(cache, _fingerprint(files, options, tokenizer), dtype)
    with _alone(cache):
        kept = entry.read()
        if kept is None:
            if not entry.write(_pieces(files, options, tokenizer), path):
                raise _nothing(path)
            kept = entry.read()
    if kept is None:
        raise OSError(f"the token ids in {cache} are not what was written there")
    return kept


class _Entry:
    """Three files: ids, starts of documents, and (written last) what they are."""

    def __init__(self, folder: Path, key: str, dtype: str) -> None:
        self._ids, self._starts, self._about = (folder / f"{key}.{end}" for end in ("ids", "starts", "json"))
        self._dtype = dtype

    def read(self) -> Tokens | None:
        """What is there; None where nothing is, or where the files do not fit together."""
        try:
            about = json.loads(self._about.read_text(encoding="utf-8"))
            count, documents = about["tokens"], about["documents"]
            sizes = (count * np.dtype(self._dtype).itemsize, documents * 8)
            if count < 1 or sizes != (self._ids.stat().st_size, self._starts.stat().st_size):
                return None
            ids = np.memmap(self._ids, self._dtype, "r")
            starts = np.memmap(self._starts, "<i8", "r")
            return Tokens(ids, starts, int(about["checksum"]), int(about["highest"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write(self, pieces: Iterator[Piece], source: Path | None) -> int:
        """Whole or not at all; returns how many ids there are."""
        drafts = [file.with_name(f"{file.name}.{os.getpid()}") for file in (self._ids, self._starts, self._about)]
        try:
            with open(drafts[0], "wb") as stream:
                starts, count, checksum, highest = collect(pieces, self._dtype, stream.write)
            if count:
                drafts[1].write_bytes(np.array(starts, "<i8").tobytes())
                about = {
                    "source": "the standard library" if source is None else str(source.absolute()),
                    "tokens": count,
                    "documents": len(starts),
                    "checksum": checksum,
                    "highest": highest,
                }
                drafts[2].write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
                for draft, file in zip(drafts, (self._ids, self._starts, self._about), strict=True):
                    draft.replace(file)
            return count
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)


def _pieces(files: Sequence[Path], options: TextOptions, tokenizer: Tokenizer) -> Iterator[Piece]:
    """With a progress bar, where that takes long and somebody sees it."""
    with tqdm(files, desc="reading text", unit="file", disable=None, delay=1, leave=False) as bar:
        yield from encode_files(bar, options, tokenizer)


def _fingerprint(files: Sequence[Path], options: TextOptions, tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(repr((_VERSION, options.format, options.field, tokenizer.identity)).encode())
    for file in files:
        status = file.stat()
        digest.update(repr((str(file.absolute()), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:20]


def _nothing(path: Path | None) -> DataError:
    return DataError(f"there is no text in {path}: every file or document is empty")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else is in here with this folder, where its file system can tell; else both do the same work."""
    with open(folder / MARK, "ab") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield  # closing the file lets the next one in
