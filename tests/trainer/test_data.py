"""Text to batches: the same on every machine and rank, every window once an epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.trainer.data import IGNORE_INDEX, PackedText
from hyper_parallel.trainer.text import ByteTokenizer, find_files, read_tokens

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id


def numbered(tokens: int = 1001, **changes: int) -> PackedText:
    """Token i is i."""
    settings = {"sequence_length": 10, "batch_size": 8, "seed": 3, **changes}
    return PackedText(np.arange(tokens, dtype=np.uint16), **settings)


def test_labels_are_the_tokens_that_follow() -> None:
    batch = numbered(tokens=201).batch(1)
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    np.testing.assert_array_equal(batch.labels, batch.tokens + 1)
    assert (batch.tokens[:, 0] % 10 == 0).all()


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


def test_the_beginning_of_the_next_document_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"cde")
    tokens = read_tokens(tmp_path)
    assert tokens.tolist() == [BOS, 97, 98, EOS, BOS, 99, 100, 101, EOS]
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
    assert read_tokens(tmp_path / "x.bin").tolist() == [BOS, 0, 255, EOS]


def test_the_default_is_the_standard_library() -> None:
    files = find_files(None)
    assert len(files) > 300 and all(f.suffix == ".py" for f in files)
    assert any(f.name == "argparse.py" for f in files)
    assert not any("site-packages" in f.parts for f in files)


def test_missing_empty_and_too_little_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no data at .*nowhere"):
        read_tokens(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no text files in"):
        read_tokens(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(FileNotFoundError, match="is empty"):
        read_tokens(tmp_path)
    with pytest.raises(ValueError, match="51 tokens of text give 5 windows of 10; a batch needs 8"):
        numbered(tokens=51)
    with pytest.raises(ValueError, match="a batch of 8 cannot be dealt out to 3"):
        numbered().batch(0, 0, 3)


def test_text_survives_the_tokenizer() -> None:
    text = "def f():\n    return 'héλ'\n"
    ids = ByteTokenizer.encode_document(text.encode())
    assert ids.max() < ByteTokenizer.vocab_size
    assert ByteTokenizer.decode(ids) == text
