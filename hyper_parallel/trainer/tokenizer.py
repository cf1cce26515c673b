"""From text to token ids: bytes, or what a ``tokenizer.json`` says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hyper_parallel.errors import how_to_install
from hyper_parallel.trainer.byte_tokenizer_files import is_byte_tokenizer
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.data_tokens import DataError
from hyper_parallel.trainer.text import ByteTokenizer

__all__ = ["JsonTokenizer", "Tokenizer", "load_tokenizer"]

_CONFIG = "tokenizer_config.json"


class Tokenizer(Protocol):
    """What the reading of text needs."""

    @property
    def identity(self) -> str:
        """Tells tokenizers apart that give other ids."""

    @property
    def vocab_size(self) -> int:
        """Every id is smaller."""

    @property
    def bos_id(self) -> int | None:
        """Begins a document."""

    @property
    def eos_id(self) -> int | None:
        """Ends a document."""

    def encode_batch(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each content, without ``bos_id`` and ``eos_id``.

        Raises:
            UnicodeDecodeError: a content is not UTF-8, where that matters.
        """

    def decode(self, ids: np.ndarray) -> str:
        """The text, without specials."""


class JsonTokenizer:
    """A ``tokenizer.json``, through Hugging Face's ``tokenizers``.

    Text that looks like a special token is encoded as the text that it is: a document cannot end itself.

    Args:
        path: the file.
        bos_token: begins each document; None: what the ``tokenizer_config.json`` beside the file names, unless
            it says ``"add_bos_token": false``.
        eos_token: ends each document; None: what that file names.

    Raises:
        DataError: a file cannot be read, the vocabulary lacks a token, or the package is not installed.
    """

    def __init__(self, path: Path, bos_token: str | None = None, eos_token: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ModuleNotFoundError:
            raise DataError(
                f"{path} needs the package 'tokenizers'; install it with: {how_to_install('text')}"
            ) from None
        config = _read_config(path.with_name(_CONFIG))
        try:
            content = path.read_bytes()
            self._backend: Any = Backend.from_buffer(content)
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"cannot read a tokenizer from {path}: {error}") from None
        # The file may ask for what suits single sentences.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.vocab_size: int = max(self._backend.get_vocab().values(), default=-1) + 1
        if bos_token is None and config.get("add_bos_token") is not False:
            bos_token = _token(config, "bos_token")
        self.bos_id = self._id(bos_token, path)
        self.eos_id = self._id(_token(config, "eos_token") if eos_token is None else eos_token, path)
        self.identity = f"{hashlib.sha256(content).hexdigest()} {self.bos_id} {self.eos_id}"

    def encode_batch(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """uint32 ids of each content, without ``bos_id`` and ``eos_id``."""
        texts = [content.decode("utf-8") for content in contents]
        found = self._backend.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def decode(self, ids: np.ndarray) -> str:
        """The text, without specials."""
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def _id(self, token: str | None, path: Path) -> int | None:
        if token is None:
            return None
        found: int | None = self._backend.token_to_id(token)
        if found is None:
            raise DataError(f"the vocabulary of {path} has no token {token!r}")
        return found


def load_tokenizer(options: TextOptions) -> Tokenizer:
    """The one that the options name.

    Raises:
        DataError: it cannot be used.
    """
    path, marks = options.tokenizer, (options.bos_token, options.eos_token)
    if path is not None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if marks == (None, None) and is_byte_tokenizer(file):
            return ByteTokenizer()  # the same ids, sooner, and without the package
        return JsonTokenizer(file, *marks)
    for name in ("bos_token", "eos_token"):
        if getattr(options, name) is not None:
            raise DataError(f"{name} is {getattr(options, name)!r}, but there is no tokenizer whose token it could be")
    return ByteTokenizer()


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not isinstance(config, Mapping):
        raise DataError(f"{path} holds a {type(config).__name__}; expected an object")
    return config


def _token(config: Mapping[str, Any], name: str) -> str | None:
    """A token of the configuration, which may be a string or an object with the string in it."""
    found = config.get(name)
    found = found.get("content") if isinstance(found, Mapping) else found
    return found if isinstance(found, str) else None
