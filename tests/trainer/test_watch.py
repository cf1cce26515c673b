"""What a person watches: events, the picture, the last words."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from hyper_parallel.trainer.command_line import parse_train_options
from hyper_parallel.trainer.job import run_worker
from hyper_parallel.trainer.metrics import _rows_until
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.report import describe_run, missing_packages
from hyper_parallel.trainer.summary import RunSummary, compare_runs, encode_json, read_column
from hyper_parallel.trainer.tensorboard_log import TensorBoardLog
from tests.harness import run_distributed
from tests.trainer.small_jobs import TINY, write_text


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, through TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag][event.step] = make_ndarray(value.tensor).item()
    return dict(found)


def test_a_new_run_replaces_the_events_and_a_resumed_one_adds_to_them(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.write({"step": 1, "loss": 3.0})
    log.close()
    log = TensorBoardLog(tmp_path, start=1)
    log.write({"step": 2, "loss": float("nan"), "lr": 0.5})
    log.close()
    assert events(tmp_path)["loss"][1] == 3.0 and events(tmp_path)["lr"] == {2: 0.5}
    TensorBoardLog(tmp_path).close()
    assert events(tmp_path) == {}


def train_here(arguments: list[str]) -> None:
    """In a worker of the harness."""
    run_worker(parse_train_options(arguments))


@pytest.mark.platform("torch")
def test_the_events_of_a_job_are_the_rows_of_its_metrics(tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ["--data", str(write_text(tmp_path)), "--output", str(output), "--steps", "7", *TINY]
    options += ["--metrics.enable-tensorboard", "--validation.freq", "3", "--validation.steps", "1"]
    run_distributed(train_here, options, platform="torch", world_size=2)
    found = events(output / "tensorboard")
    names = ("loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes", "validation_loss")
    for name in names:
        assert found[name] == pytest.approx(read_column(output / "metrics.jsonl", name), rel=1e-6), name
    assert list(found["loss"]) == list(range(1, 8)) and list(found["validation_loss"]) == [3, 6, 7]
    assert len(list((output / "tensorboard").iterdir())) == 1  # rank 0 alone writes


@pytest.fixture
def job(tmp_path: Path) -> tuple[TrainOptions, RunSummary]:
    """A run that has ended."""
    rows = [{"step": s, "loss": 5.0 / s, "grad_norm": 1.0} for s in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = RunSummary(5, False, 5.0, 1.0, 2.0, 100.0, 2**20, 9, "torch", "2.13", 1, 2)
    summary.write(tmp_path)
    return TrainOptions(output=tmp_path), summary


def test_the_last_words_say_how_it_went_and_where_things_are(job: tuple[TrainOptions, RunSummary]) -> None:
    options, summary = job
    said = describe_run(options, summary)
    assert "5 steps in 2.0 s, loss 5.0000 in the first step, 1.0000 in the last" in said
    for name in ("metrics.jsonl", "summary.json", "loss.png"):
        assert f"  {options.output / name}  (" in said
    assert "tensorboard" not in said and "checkpoints" not in said
    assert (options.output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert RunSummary.read(options.output) == summary


def test_a_run_that_went_on_says_which_steps_it_took(job: tuple[TrainOptions, RunSummary]) -> None:
    part = dataclasses.replace(job[1], steps=14, start=10)
    assert "parameters: steps 10 -> 14, 4 steps in 2.0 s" in part.describe()
    assert "stopped after steps 10 -> 14, 4 steps in" in dataclasses.replace(part, interrupted=True).describe()


def test_numbers_that_are_none_are_null(job: tuple[TrainOptions, RunSummary]) -> None:
    folder, infinite = job[0].output, float("inf")
    dataclasses.replace(job[1], first_loss=infinite, last_loss=-infinite).write(folder)
    (folder / "metrics.jsonl").write_text(encode_json({"step": 1, "loss": math.nan, "lr": 0.5}) + "\n")

    def strict(text: str) -> dict[str, object]:
        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        found: dict[str, object] = json.loads(text, parse_constant=refuse)
        return found

    assert strict((folder / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "lr": 0.5}
    assert strict((folder / "summary.json").read_text())["last_loss"] is None
    assert math.isnan(read_column(folder / "metrics.jsonl", "loss")[1])
    assert math.isnan(_rows_until(folder / "metrics.jsonl", 1)[0]["loss"])
    assert "loss nan in the first step, nan in the last" in RunSummary.read(folder).describe()


def test_without_matplotlib_there_is_a_note_and_no_stale_picture(
    job: tuple[TrainOptions, RunSummary], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, summary = job
    (options.output / "loss.png").write_bytes(b"another run's")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = describe_run(options, summary)
    assert "no picture of the loss: that needs the package 'matplotlib" in said
    assert "pip install 'hyper_parallel[watch]'" in said and not (options.output / "loss.png").exists()
    quiet = dataclasses.replace(options, metrics=dataclasses.replace(options.metrics, picture=False))
    assert "picture" not in describe_run(quiet, summary)


def test_missing_packages_are_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse_train_options(["--metrics.enable-tensorboard"])
    installed = {"torch", "tensorboard"}
    monkeypatch.setattr("hyper_parallel.trainer.report.find_spec", lambda name: name if name in installed else None)
    assert missing_packages(options) is None and missing_packages(TrainOptions()) is None
    installed.remove("torch")
    expected = "torch is not installed; install it with: pip install 'hyper_parallel[torch]' (in a checkout: "
    assert missing_packages(TrainOptions()) == f"{expected}pip install -c constraints.txt '.[torch]')"
    installed.symmetric_difference_update({"torch", "tensorboard"})
    assert missing_packages(TrainOptions()) is None
    assert "enable_tensorboard needs the package 'tensorboard'; install it with" in str(missing_packages(options))


def metrics(path: Path, losses: list[float]) -> Path:
    rows = [{"step": s, "loss": loss, "grad_norm": 2 * loss} for s, loss in enumerate(losses, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 2, "validation_loss": 1.0}]))
    return path


def test_runs_are_compared_step_by_step(tmp_path: Path) -> None:
    one, other = metrics(tmp_path / "a", [5.0, 4.0, 3.0]), metrics(tmp_path / "b", [5.0, 4.5, 3.25])
    found = compare_runs(one, other)
    assert dataclasses.astuple(found) == (3, 0.5, 2, 1.0, 2)
    assert found.describe().splitlines() == [
        "maximum loss difference in 3 steps: 5.00e-01 (step 2)",
        "maximum gradient norm difference: 1.00e+00 (step 2)",
    ]
    worst = compare_runs(one, metrics(tmp_path / "c", [float("nan"), 4.5, 3.0]))
    assert worst.step == 1 and worst.max_difference != worst.max_difference
    with pytest.raises(ValueError, match="different steps: 3 and 2; nothing to compare"):
        compare_runs(one, metrics(tmp_path / "d", [5.0, 4.0]))
