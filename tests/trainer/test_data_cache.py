"""Files to token ids: JSON lines, large files in pieces, and what is kept of them on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.trainer import data_files
from hyper_parallel.trainer.data_cache import open_tokens
from hyper_parallel.trainer.data_open import open_text
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.data_tokens import DataError
from hyper_parallel.trainer.options import TrainingOptions, TrainOptions
from hyper_parallel.trainer.output_folder import MARK, mark_output
from hyper_parallel.trainer.text import ByteTokenizer

ROOT = Path(__file__).resolve().parents[2]
BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id


def lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_a_line_is_a_document(tmp_path: Path) -> None:
    rows = [{"id": 1, "body": "ab"}, {"body": ""}, {"body": "é"}]
    path = lines(tmp_path / "a.jsonl", "\ufeff", *rows, "\n", "  \n", '{"body": "z"}')
    tokens = open_tokens(path, TextOptions(field="body"))
    assert tokens.ids.tolist() == [BOS, 97, 98, EOS, BOS, 0xC3, 0xA9, EOS, BOS, 122, EOS]
    assert tokens.starts.tolist() == [0, 4, 8]


def test_the_name_or_the_option_says_what_a_file_is(tmp_path: Path) -> None:
    text = '{"text": "a"}'
    for name in ("a.jsonl", "b.ndjson", "c.txt"):
        (tmp_path / name).write_text(text)
    plain = [BOS, *text.encode(), EOS]
    assert open_tokens(tmp_path, TextOptions()).ids.tolist() == [BOS, 97, EOS, BOS, 97, EOS, *plain]
    assert open_tokens(tmp_path, TextOptions(format="text")).ids.tolist() == plain * 3
    assert open_tokens(tmp_path, TextOptions(format="jsonl")).ids.tolist() == [BOS, 97, EOS] * 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "a.jsonl:3: not a line of JSON: "),
        ("[1]", "a.jsonl:3: a JSON list; expected an object with the field 'text'"),
        ('{"txt": "a"}', r"a.jsonl:3: no field 'text'; the fields are \['txt'\]"),
        ('{"text": 7}', "a.jsonl:3: the field 'text' holds a int; expected a string"),
        ('{"text": "\\ud800"}', "a.jsonl:3: the field 'text' is no text: "),
        ("[" * 100_000, "a.jsonl:3: (JSON nested too deeply|not a line of JSON)"),
    ],
)
def test_a_malformed_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"}, line + "\n")
    with pytest.raises(DataError, match=message):
        open_tokens(path, TextOptions())


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match="a.jsonl:2: not a line of JSON: .*utf-8"):
        open_tokens(path, TextOptions())


@pytest.mark.parametrize("size", [4, 5, 6, 7, 100])
@pytest.mark.parametrize("content", ["one\ntwo\n\nthree four five\nsix", "aé€😀" * 9, "abc\n"])
def test_a_large_file_is_one_document_read_in_pieces(
    content: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_PIECE_BYTES", size)
    monkeypatch.setattr(data_files, "_GROUP_BYTES", 8)
    path = tmp_path / "a"
    path.write_text(content)
    tokens = open_tokens(path, TextOptions())
    assert tokens.ids.tolist() == [BOS, *content.encode(), EOS] and tokens.starts.tolist() == [0]
    for part in data_files._read_text(path):
        assert len(part.content) <= 2 * size + 1
        part.content.decode("utf-8")  # no character is cut


def test_reading_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(data_files, "_GROUP_BYTES", 1 << 20)
    path = tmp_path / "a.txt"
    path.write_bytes(b"some text that goes on and on\n" * (1 << 20))
    tracemalloc.start()
    try:
        tokens = open_tokens(path, TextOptions(), tmp_path / "cache")
        batch = tokens.ids[len(tokens.ids) // 2 :][:1000].sum()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch > 0 and len(tokens.ids) == path.stat().st_size + 2 and path.stat().st_size >= 30 << 20
    assert peak < 12 << 20


def test_ids_are_kept_mapped_and_made_anew_when_something_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("hello")
    first = open_tokens(path, TextOptions(), cache)
    assert isinstance(first.ids, np.memmap) and isinstance(first.starts, np.memmap)
    in_memory = open_tokens(path, TextOptions())
    np.testing.assert_array_equal(first.ids, in_memory.ids)
    assert (first.checksum, first.highest) == (in_memory.checksum, in_memory.highest) and first.highest == EOS

    def files() -> dict[str, int]:
        return {f.name: f.stat().st_mtime_ns for f in cache.iterdir() if f.name != MARK}

    before = files()
    assert len(before) == 3
    open_tokens(path, TextOptions(), cache)
    assert files() == before  # nothing was read again
    os.utime(path, ns=(0, 0))
    assert open_tokens(path, TextOptions(), cache).checksum == first.checksum and len(files()) == 6
    path.write_text("hallo")
    assert open_tokens(path, TextOptions(), cache).ids.tolist() == [BOS, *b"hallo", EOS]


def test_what_the_job_writes_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 20)
    training = TrainingOptions(batch_size=1, sequence_length=8)
    options = TrainOptions(data=Path("."), output=Path("runs/a"), training=training)
    cached = replace(options, text=TextOptions(cache=Path("runs/cache")))
    alone = replace(cached, output=Path("runs/a/single_process"))
    before = open_text(options).fingerprint
    for name in ("runs/a/metrics.jsonl", "runs/a/logs/rank1.log", "runs/a/single_process/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "more"}\n')
    assert {open_text(o).fingerprint for o in (options, cached, alone)} == {before}
    (tmp_path / "runs/b.txt").write_text("more text")
    assert open_text(options).fingerprint != before
    with pytest.raises(DataError, match="runs/a is the output folder"):
        open_text(replace(options, data=Path("runs/a")))


def test_what_other_commands_have_written_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In folders with the mark, and in those copied without it; a data set may have files of such names."""
    monkeypatch.chdir(tmp_path)
    options = TrainOptions(data=Path("."), output=Path("own"), training=TrainingOptions(1, 8))
    for name, content in {
        "a.txt": "some text " * 9,
        "sets/metrics.jsonl": '{"text": "a"}\n',
        "sets/state.json": "{}",
        "sets/config.json": "{}",
    }.items():
        lines(tmp_path / name, content)
    expected = open_text(options).fingerprint
    assert not capsys.readouterr().out
    mark_output(tmp_path / "runs/marked")
    for name, content in {
        "runs/marked/logs/rank1.log": "said",
        "runs/copied/metrics.jsonl": '{"step": 1, "loss": 5.5, "grad_norm": 2.0}\n',
        "runs/copied/tensorboard/note": "text",
        "best/manifest.json": "{}",
        "best/state.json": "{}",
        "best/model/config.json": "{}",
        "exported/config.json": "{}",
        "exported/model.safetensors": "weights",
        "own/tokens/old.json": "{}",
    }.items():
        lines(tmp_path / name, content)
    assert open_text(options).fingerprint == expected
    said = "no part of the text of ., since commands have written there: best, exported, runs/copied and 1 more\n"
    assert capsys.readouterr().out == said
    for rank, expected_words in (("0", said), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        open_text(options)
        assert capsys.readouterr().out == expected_words
    with pytest.raises(DataError, match="runs/marked holds output of hyper-parallel, and no text; name the folder"):
        open_text(replace(options, data=Path("runs/marked")))


@pytest.mark.parametrize("damage", ["ids", "starts", "json", "nonsense"])
def test_damaged_files_are_made_anew(damage: str, tmp_path: Path) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("hello")
    expected = open_tokens(path, TextOptions(), cache).ids.tolist()
    (about,) = cache.glob("*.json")
    if damage == "nonsense":
        about.write_text('{"tokens": "many"}')
    else:
        with open(about.with_suffix(f".{damage}"), "r+b") as stream:
            stream.truncate(3)
    assert open_tokens(path, TextOptions(), cache).ids.tolist() == expected


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    path, cache = lines(tmp_path / "a.jsonl", {"text": "a"}, "[\n"), tmp_path / "cache"
    with pytest.raises(DataError, match="a.jsonl:2"):
        open_tokens(path, TextOptions(), cache)
    assert [f.name for f in cache.iterdir()] == [MARK]
    lines(path, {"text": ""})
    with pytest.raises(DataError, match="every file or document is empty"):
        open_tokens(path, TextOptions(), cache)
    assert [f.name for f in cache.iterdir()] == [MARK]


def test_several_processes_may_ask_at_once(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(50):
        (text / f"{i:02}").write_text(f"document {i}\n" * 400)
    program = (
        "import sys; from pathlib import Path; from hyper_parallel.trainer.data_cache import open_tokens;"
        "from hyper_parallel.trainer.data_options import TextOptions;"
        f"found = open_tokens(Path({str(text)!r}), TextOptions(), Path({str(tmp_path / 'cache')!r}));"
        "print(found.checksum, len(found.ids))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    expected = open_tokens(text, TextOptions())
    for job in jobs:
        assert job.communicate(timeout=60)[0].split() == [str(expected.checksum), str(len(expected.ids))]
    assert len(list((tmp_path / "cache").iterdir())) == 4
