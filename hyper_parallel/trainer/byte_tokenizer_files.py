"""The tokenizer of bytes as the files that Hugging Face's libraries read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hyper_parallel.trainer.text import ByteTokenizer

__all__ = ["is_byte_tokenizer", "write_byte_tokenizer"]

_SPECIALS = {
    "bos_token": ("<bos>", ByteTokenizer.bos_id),
    "eos_token": ("<eos>", ByteTokenizer.eos_id),
    "pad_token": ("<pad>", ByteTokenizer.pad_id),
}


def write_byte_tokenizer(folder: Path) -> list[str]:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which give the ids of :class:`ByteTokenizer`, and a
    ``generation_config.json``, by which a text ends where a document does.

    Returns:
        The names of the files.

    Raises:
        OSError: they cannot be written.
    """
    ids = {f"{name}_id": number for name, (_, number) in _SPECIALS.items()}
    written = {**_tokenizer_files(), "generation_config.json": _encode(ids)}
    for name, content in written.items():
        (folder / name).write_text(content, encoding="utf-8")
    return list(written)


def is_byte_tokenizer(file: Path) -> bool:
    """Whether it is the ``tokenizer.json`` that is written here, with its ``tokenizer_config.json`` beside it:
    :class:`ByteTokenizer` can stand for it then.
    """
    found = _tokenizer_files()
    try:
        return file.name in found and all(
            file.with_name(name).read_bytes() == content.encode("utf-8") for name, content in found.items()
        )
    except OSError:
        return False


@cache
def _tokenizer_files() -> dict[str, str]:
    """A byte-pair encoding without pairs: each byte is a token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **special} for text, number in _SPECIALS.values()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {_character(byte): byte for byte in range(256)}, "merges": []},
    }
    config: dict[str, object] = {name: text for name, (text, _) in _SPECIALS.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["model_input_names"] = ["input_ids", "attention_mask"]
    return {"tokenizer.json": _encode(content), "tokenizer_config.json": _encode(config)}


def _encode(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _character(byte: int) -> str:
    """What stands for a byte in a byte-level vocabulary: the byte's own Latin-1 character where it is a visible one,
    else one of those after U+00FF, in the bytes' order (the convention of GPT-2's tokenizer).
    """
    if _is_visible(byte):
        return chr(byte)
    return chr(256 + sum(not _is_visible(other) for other in range(byte)))


def _is_visible(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
