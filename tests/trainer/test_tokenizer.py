"""A tokenizer.json: whole texts, marks round documents, and text that looks like a mark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.trainer.data_cache import open_tokens
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.data_tokens import DataError
from hyper_parallel.trainer.tokenizer import JsonTokenizer, load_tokenizer

FABLES = Path(__file__).resolve().parents[2] / "examples" / "fables"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example's tokenizer, to change."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((FABLES / name).read_bytes())
    return tmp_path


def change(folder: Path, **content: object) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(content))
    return folder / "tokenizer.json"


def test_every_document_survives_between_its_marks() -> None:
    tokens = open_tokens(FABLES / "fables.jsonl", TextOptions(tokenizer=FABLES))
    tokenizer = JsonTokenizer(FABLES / "tokenizer.json")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 512)
    assert tokens.ids.dtype == np.uint16 and tokens.highest < 512
    texts = [json.loads(line)["text"] for line in (FABLES / "fables.jsonl").read_text().splitlines()]
    for text, ids in zip(texts, np.split(tokens.ids, tokens.starts[1:]), strict=True):
        assert (ids[0], ids[-1]) == (0, 1)
        assert tokenizer.decode(ids) == text


def test_ids_are_those_of_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(FABLES / "tokenizer.json"))
    text = "The crow  and the well.\n\nLéon’s goat?"
    (ours,) = JsonTokenizer(FABLES / "tokenizer.json").encode_batch([text.encode()])
    assert ours.tolist() == theirs(text, add_special_tokens=False)["input_ids"]


def test_a_text_cannot_end_its_document() -> None:
    tokenizer = JsonTokenizer(FABLES / "tokenizer.json")
    (ids,) = tokenizer.encode_batch([b"a<|end|>b<|begin|>"])
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(ids) == "a<|end|>b<|begin|>"


def test_the_marks_come_from_the_options_or_from_the_configuration(folder: Path) -> None:
    path = change(folder, eos_token={"content": "<|end|>", "lstrip": False})
    assert (JsonTokenizer(path).bos_id, JsonTokenizer(path).eos_id) == (None, 1)
    assert JsonTokenizer(path, "<|begin|>", "<|begin|>").eos_id == 0
    path = change(folder, bos_token="<|begin|>", eos_token="<|end|>", add_bos_token=False)
    assert (JsonTokenizer(path).bos_id, JsonTokenizer(path).eos_id) == (None, 1)
    (folder / "tokenizer_config.json").unlink()
    assert (JsonTokenizer(path).bos_id, JsonTokenizer(path).eos_id) == (None, None)
    (folder / "a.txt").write_text("crow")
    (folder / "b.txt").write_text("crow")
    tokens = open_tokens(folder / "a.txt", TextOptions(tokenizer=path))
    assert tokens.starts.tolist() == [0] and not {0, 1} & set(tokens.ids.tolist())


def test_truncation_and_padding_of_the_file_are_left_out(folder: Path) -> None:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    long, short = JsonTokenizer(path).encode_batch([b"the crow and the well", b"a"])
    assert len(long) > 4 and len(short) == 1


def test_another_tokenizer_makes_other_files(folder: Path, tmp_path: Path) -> None:
    text, cache = FABLES / "fables.jsonl", tmp_path / "cache"
    found = [open_tokens(text, TextOptions(tokenizer=t), cache).checksum for t in (FABLES, None)]
    path = change(folder, eos_token="<|begin|>")
    found.append(open_tokens(text, TextOptions(tokenizer=path), cache).checksum)
    assert len(set(found)) == 3


def test_what_cannot_be_used_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="cannot read a tokenizer from .*nowhere"):
        load_tokenizer(TextOptions(tokenizer=folder / "nowhere"))
    with pytest.raises(DataError, match="has no token '</s>'"):
        load_tokenizer(TextOptions(tokenizer=folder, eos_token="</s>"))
    with pytest.raises(DataError, match="bos_token is '<s>', but there is no tokenizer"):
        load_tokenizer(TextOptions(bos_token="<s>"))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="latin.txt: not UTF-8, which the tokenizer needs"):
        open_tokens(folder / "latin.txt", TextOptions(tokenizer=folder))
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match="cannot read .*tokenizer_config.json"):
        load_tokenizer(TextOptions(tokenizer=folder))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="cannot read a tokenizer from"):
        load_tokenizer(TextOptions(tokenizer=folder))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs the package 'tokenizers'; install it with: pip install"):
        load_tokenizer(TextOptions(tokenizer=FABLES))
