"""Text to batches: the same on every machine and rank, every window once an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.trainer.data import IGNORE_INDEX, PackedText
from hyper_parallel.trainer.data_cache import open_tokens
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.data_tokens import DataError, Tokens
from hyper_parallel.trainer.text import ByteTokenizer, find_files

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id


def numbered(tokens: int = 1001, **changes: int) -> PackedText:
    """One document; token i is i."""
    settings = {"sequence_length": 10, "batch_size": 8, "seed": 3, **changes}
    return PackedText(Tokens.of([np.arange(tokens)]), **settings)


def read(path: Path | None) -> Tokens:
    return open_tokens(path, TextOptions())


def test_labels_are_the_tokens_that_follow() -> None:
    batch = numbered(tokens=201).batch(1)
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    np.testing.assert_array_equal(batch.labels, batch.tokens + 1)
    assert (batch.tokens[:, 0] % 10 == 0).all()
    assert batch.position_ids is None


def test_an_epoch_visits_every_window_once_in_its_own_order() -> None:
    text = numbered()  # 100 windows: 12 batches of 8 an epoch
    epochs = [[text.batch(e * 12 + s).tokens[:, 0].tolist() for s in range(12)] for e in range(2)]
    for epoch in epochs:
        flat = sum(epoch, [])
        assert len(set(flat)) == 96
    assert epochs[0] != epochs[1]


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    np.testing.assert_array_equal(numbered().batch(17).tokens, numbered().batch(17).tokens)
    assert (numbered().batch(17).tokens != numbered(seed=4).batch(17).tokens).any()


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_data_parallel_ranks_share_out_the_same_batch(dp_size: int) -> None:
    text = numbered()
    parts = [text.batch(5, rank, dp_size) for rank in range(dp_size)]
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), text.batch(5).tokens)
    np.testing.assert_array_equal(np.concatenate([p.labels for p in parts]), text.batch(5).labels)


def test_the_position_is_all_that_resuming_needs() -> None:
    position = json.loads(json.dumps(numbered().position(17)))
    assert numbered().resume(position) == 17
    for other, message in (
        (numbered(seed=4), "taken with seed 3; here it is 4"),
        (numbered(batch_size=4), "taken with batch_size 8; here it is 4"),
        (numbered(tokens=2001), "taken with text "),
    ):
        with pytest.raises(DataError, match=message):
            other.resume(position)
    with pytest.raises(DataError, match="taken with seed None"):
        numbered().resume({"step": 1})


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    length=st.integers(1, 16),
    seed=st.integers(0, 5),
)
def test_positions_and_labels_know_the_documents(lengths: list[int], length: int, seed: int) -> None:
    """Against a plain description: documents laid end to end, and windows of them."""
    documents = [np.arange(n) + 100 * d for d, n in enumerate(lengths)]
    whole = np.concatenate(documents)
    owner = np.concatenate([np.full(n, d) for d, n in enumerate(lengths)])
    windows = (len(whole) - 1) // length
    if windows == 0:
        return
    text = PackedText(Tokens.of(documents), length, 1, seed, document_masks=True)
    seen = set()
    for step in range(windows):
        batch = text.batch(step)
        first = int(np.flatnonzero(whole == batch.tokens[0, 0])[0])
        seen.add(first)
        assert batch.position_ids is not None
        position = 0
        for i in range(length):
            place = first + i
            position = position + 1 if i and owner[place] == owner[place - 1] else 0
            assert batch.tokens[0, i] == whole[place]
            assert batch.position_ids[0, i] == position
            expected = whole[place + 1] if owner[place + 1] == owner[place] else IGNORE_INDEX
            assert batch.labels[0, i] == expected
    assert seen == set(range(0, windows * length, length))


def test_a_part_of_the_text_is_a_text() -> None:
    whole = Tokens.of([np.arange(5), np.arange(5, 12), np.arange(12, 20)])
    part = whole.part(3, 14)
    assert part.ids.tolist() == list(range(3, 14)) and part.starts.tolist() == [0, 2, 9]
    assert whole.part(5, 12).starts.tolist() == [0]
    assert whole.part(13, 15).starts.tolist() == [0]
    assert np.shares_memory(part.ids, whole.ids)
    assert len({whole.checksum, part.checksum, whole.part(3, 15).checksum}) == 3


def test_the_beginning_of_the_next_document_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"cde")
    tokens = read(tmp_path)
    assert tokens.ids.tolist() == [BOS, 97, 98, EOS, BOS, 99, 100, 101, EOS]
    batch = PackedText(tokens, sequence_length=8, batch_size=1, seed=0).batch(0)
    assert batch.labels.tolist() == [[97, 98, EOS, IGNORE_INDEX, 99, 100, 101, EOS]]
    assert batch.valid_tokens == 7


def test_files_of_a_folder_come_in_order_without_binary_and_hidden_ones(tmp_path: Path) -> None:
    for name in ("z.txt", "b/x.md", "b.txt", "a/deep/y", ".hidden", ".git/config", "__pycache__/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "image.bin").write_bytes(b"ab\0cd")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    found = [f.relative_to(tmp_path).as_posix() for f in find_files(tmp_path)]
    assert found == ["a/deep/y", "b.txt", "b/x.md", "z.txt"]


def test_a_single_file_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0\xff")
    assert read(tmp_path / "x.bin").ids.tolist() == [BOS, 0, 255, EOS]


def test_the_default_is_the_standard_library() -> None:
    files = find_files(None)
    assert len(files) > 300 and all(f.suffix == ".py" for f in files)
    assert any(f.name == "argparse.py" for f in files)
    assert not any("site-packages" in f.parts for f in files)


def test_missing_empty_and_too_little_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no data at .*nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no text files in"):
        read(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="there is no text in .*: every file or document is empty"):
        read(tmp_path)
    with pytest.raises(DataError, match="51 tokens of text give 5 windows of 10; a batch needs 8"):
        numbered(tokens=51)
    with pytest.raises(ValueError, match="a batch of 8 cannot be dealt out to 3"):
        numbered().batch(0, 0, 3)


def test_text_survives_the_tokenizer() -> None:
    text = "def f():\n    return 'héλ'\n"
    ids = ByteTokenizer.encode_document(text.encode())
    assert ids.max() < ByteTokenizer.vocab_size
    assert ByteTokenizer.decode(ids) == text
