"""From files to pieces of documents, and on to token ids; never a whole file at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.data_tokens import DataError, Piece
from hyper_parallel.trainer.tokenizer import Tokenizer

__all__ = ["encode_files"]

_PIECE_BYTES = 16 << 20
"""A longer plain file is encoded in pieces of this size, cut after a line."""

_GROUP_BYTES = 4 << 20
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


class _Part(NamedTuple):
    """A document, or a part of one: its UTF-8, whether it begins and ends there, and where it was found."""

    content: bytes
    begins: bool
    ends: bool
    where: str


def encode_files(files: Iterable[Path], options: TextOptions, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The token ids of all files, document by document. Empty documents are left out.

    Raises:
        DataError: a line is no JSON object with a text in the field, or a text is not UTF-8 where the tokenizer
            needs that; the message names file and line.
    """
    for group in _groups(part for file in files for part in _read(file, options)):
        yield from _encode(group, tokenizer)


def _read(file: Path, options: TextOptions) -> Iterator[_Part]:
    is_jsonl = file.suffix.lower() in _JSONL_SUFFIXES if options.format == "auto" else options.format == "jsonl"
    return _read_jsonl(file, options.field) if is_jsonl else _read_text(file)


def _read_text(file: Path) -> Iterator[_Part]:
    """The file is one document."""
    begins, rest = True, b""
    with open(file, "rb") as stream:
        while True:
            content = rest + stream.read(_PIECE_BYTES)
            # One byte more tells whether this was all.
            following = stream.read(1)
            if not following:
                break
            cut = content.rfind(b"\n") + 1 or _whole_characters(content)
            yield _Part(content[:cut], begins, False, str(file))
            begins, rest = False, content[cut:] + following
    if content:
        yield _Part(content, begins, True, str(file))


def _whole_characters(content: bytes) -> int:
    """Where the last character of UTF-8 begins that may go on behind the end: not in the middle of one."""
    for back in range(1, min(4, len(content) - 1) + 1):
        if content[-back] & 0xC0 != 0x80:
            return len(content) - back
    return len(content)


def _read_jsonl(file: Path, field: str) -> Iterator[_Part]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise DataError(f"{where}: not a line of JSON: {error}") from None
            except RecursionError:
                raise DataError(f"{where}: JSON nested too deeply") from None
            if not isinstance(value, dict):
                raise DataError(f"{where}: a JSON {type(value).__name__}; expected an object with the field {field!r}")
            if field not in value:
                raise DataError(f"{where}: no field {field!r}; the fields are {sorted(value)}")
            text = value[field]
            if not isinstance(text, str):
                raise DataError(f"{where}: the field {field!r} holds a {type(text).__name__}; expected a string")
            try:
                content = text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(f"{where}: the field {field!r} is no text: {error}") from None
            if content:
                yield _Part(content, True, True, where)


def _groups(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Several at a time: a tokenizer works on those in parallel."""
    group: list[_Part] = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part.content)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(group: list[_Part], tokenizer: Tokenizer) -> Iterator[Piece]:
    try:
        encoded = tokenizer.encode_batch([part.content for part in group])
    except UnicodeDecodeError as error:
        where = next(part.where for part in group if part.content == error.object)
        raise DataError(f"{where}: not UTF-8, which the tokenizer needs: {error}") from None
    for part, ids in zip(group, encoded, strict=True):
        bos = tokenizer.bos_id if part.begins else None
        eos = tokenizer.eos_id if part.ends else None
        if bos is not None or eos is not None:
            marks = [[] if mark is None else [mark] for mark in (bos, eos)]
            ids = np.concatenate([np.array(marks[0], np.uint32), ids, np.array(marks[1], np.uint32)])
        yield Piece(ids, part.begins)

