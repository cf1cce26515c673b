"""The command line: what there is, the matrix, and one line for each thing that a person may get wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel import cli
from hyper_parallel.trainer import data_cache, report, train_command
from hyper_parallel.trainer.matrix_command import describe_matrix
from hyper_parallel.trainer.output_folder import MARK

CONTENT = {
    "versions": {"Python": "3.11.7", "PyTorch": "2.13.0+cpu", "MindSpore": "2.10.0"},
    "platforms": {"torch": "PyTorch", "mindspore": "MindSpore"},
    "rows": [
        {
            "id": "A1",
            "part": "First part",
            "text": "something that " * 12 + "ends",
            "cells": {
                "torch": {"state": "passed", "text": "passed (3)"},
                "mindspore": {"state": "no test", "text": "no test"},
            },
        },
        {
            "id": "A2",
            "part": "First part",
            "text": "another thing",
            "cells": {"torch": {"state": "passed", "text": "passed (1)"}},
        },
        {
            "id": "B1",
            "part": "Second part",
            "text": "a third one",
            "cells": {
                "torch": {"state": "failed", "text": "**failed** (1 of 2)"},
                "mindspore": {"state": "not run", "text": "not run here: no device"},
            },
        },
    ],
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No worker is started, and nothing is written into the project."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a worker was to start")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train_command, "run_job", refuse)
    monkeypatch.setattr(report, "find_spec", lambda name: name)  # as if every framework were installed
    monkeypatch.chdir(tmp_path)


def test_usage_names_every_command_and_each_has_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    for name in cli._COMMANDS:
        assert f"\n  {name}" in usage
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0
        assert f"usage: hyper-parallel {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hyper_parallel {hyper_parallel.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], ""),
        (["compair"], "unknown command 'compair'; did you mean 'compare'?"),
        (["--verison"], "unknown option '--verison'; did you mean '--version'?"),
        (["xyzzy"], "unknown command 'xyzzy'; commands are train, compare,"),
    ],
)
def test_what_does_not_exist_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


SMALL = ["--training.batch-size", "2", "--training.sequence-length", "8", "--output", "out"]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ('{"text": "abc"}\n{"text"\n', [], "data.jsonl:2: not a line of JSON: "),
        ('{"body": "abc"}\n', [], "data.jsonl:1: no field 'text'; the fields are ['body']"),
        ("", [], "there is no text in data.jsonl: every file or document is empty"),
        ('{"text": "abc"}\n', [], "5 tokens of text give 0 windows of 8; a batch needs 2: use more text,"),
        ('{"text": "abc"}\n', ["--model.vocab-size", "100"], "token id 257, but vocab_size is 100"),
        ('{"text": "abc"}\n', ["--text.tokenizer", "nowhere.json"], "cannot read a tokenizer from nowhere.json"),
        ('{"text": "abc"}\n', ["--nproc", "3"], "(2) = 2 must equal nproc (3): set --nproc 2, or --parallelism.t"),
        (
            '{"text": "abc"}\n',
            ["--nproc", "4"],
            "--nproc 2, or --parallelism.data-parallel-degree 2, or --parallelism.tensor-parallel-degree 4",
        ),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_wrong_text_is_told_in_one_line_before_any_worker_starts(
    command: str, content: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data.jsonl").write_text(content)
    assert cli.main([command, "--data", "data.jsonl", *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hyper-parallel {command}: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "compare"])
def test_ctrl_c_while_text_is_read_ends_the_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data_cache, "encode_files", interrupted)
    Path("data.txt").write_text("some text " * 20)
    assert cli.main([command, "--data", "data.txt", *SMALL]) == 130
    assert capsys.readouterr().err == f"\nhyper-parallel {command}: stopped by SIGINT\n"
    assert [f.name for f in Path("out/tokens").iterdir()] == [MARK]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "1", "--parallelism.tensor-parallel-degree", "1"], "there is one process, and nothing to compare"),
        (["--checkpoint.enable"], "both runs start anew; leave out checkpoint.enable"),
    ],
)
def test_what_cannot_be_compared_is_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data.txt").write_text("some text " * 20)
    assert cli.main(["compare", "--data", "data.txt", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("train", 2, "run is a folder; expected a YAML file of options. A checkpoint, or the folder of a run, goes to"),
        ("eval", 2, "cannot evaluate run: no checkpoint at run: expected a folder with manifest.json"),
    ],
)
def test_a_folder_in_the_place_of_an_options_file(
    command: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    assert cli.main([command, "run"]) == status
    assert message in capsys.readouterr().err


def test_the_launcher_loads_no_framework() -> None:
    Path("data.jsonl").write_text('{"text": "abc"}\n')
    program = (
        "import sys; from hyper_parallel import cli;"
        "status = cli.main(['train', '--data', 'data.jsonl', '--metrics.enable-tensorboard']);"
        "assert status == 2, status;"
        "loaded = {'torch', 'mindspore', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    root = Path(hyper_parallel.__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(root)}, check=True, timeout=60)


def test_the_matrix_says_what_runs_here() -> None:
    lines = describe_matrix(CONTENT, {"torch": "2.13.0"}, width=90).splitlines()
    assert "PyTorch 2.13.0, MindSpore not installed" in lines[0]
    assert "First part" in lines and "Second part" in lines
    table = {line.split()[0]: line for line in lines if line.startswith("  ") and line.split()[0] in ("A1", "A2", "B1")}
    assert table["A1"].startswith("  A1       runs here      not installed  something that")
    assert table["A2"].startswith("  A2       runs here      -              another thing")
    assert table["B1"].startswith("  B1       FAILS          not installed  a third one")
    assert max(map(len, lines)) <= 90 and "has not run with" not in "\n".join(lines)


def test_the_matrix_shows_other_versions_and_what_is_missing() -> None:
    installed = {"torch": "2.6.0", "mindspore": "2.10.0"}
    text = describe_matrix(CONTENT, installed, missing=True)
    assert "The suite has not run with PyTorch 2.6.0, but with 2.13.0+cpu." in text
    assert "  A1       runs here      no test" in text and "A2" not in text
    assert "  B1       FAILS          not tried" in text


def test_the_matrix_command_shows_the_rows_of_this_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--backend", "mindspore"]) == 0
    shown = capsys.readouterr().out
    data = json.loads(Path(hyper_parallel.__file__).with_name("support_matrix.json").read_text(encoding="utf-8"))
    assert all(f"\n  {row['id']:<7}" in shown for row in data["rows"])
    assert "MindSpore" in shown and "PyTorch  " not in shown
