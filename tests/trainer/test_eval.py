"""Validation during training and ``hyper-parallel eval``: the loss of the whole text, whoever holds which part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel import cli
from hyper_parallel.core.device_mesh import init_device_mesh
from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.platform.weights import get_weight_backend
from hyper_parallel.tensor_parallel.model_tensors import every_rank
from hyper_parallel.trainer import eval_progress
from hyper_parallel.trainer.checkpoint_manifest import FileFacts, Manifest
from hyper_parallel.trainer.checkpoint_read import check_weights
from hyper_parallel.trainer.checkpoint_state import TrainState
from hyper_parallel.trainer.command_line import UsageError, parse_options, parse_train_options
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.eval_command import _find, _what_to_read
from hyper_parallel.trainer.eval_options import EvalOptions
from hyper_parallel.trainer.trainer import Trainer
from hyper_parallel.trainer.validation_text import open_texts
from tests.harness import run_distributed
from tests.trainer.small_jobs import ROOT, TINY, train, write_text

pytestmark = pytest.mark.platform("torch")

VALIDATION = ("--validation.freq", "2", "--validation.held-out", "0.1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("job"))


def arguments_of(text: Path) -> list[str]:
    return ["--data", str(text), "--output", str(text.parent / "out"), *TINY, *VALIDATION]


def loss_token_by_token(arguments: list[str]) -> tuple[float, int]:
    """In a worker: the loss of an untrained model on the held-out text, window by window, in float64 NumPy."""
    options = parse_train_options([*arguments, "--parallelism.tensor-parallel-degree", "1"])
    text, held_out = open_texts(options)
    assert held_out is not None
    trainer = Trainer(options, init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), text)
    total, count = 0.0, 0
    for window in range(held_out.windows):
        batch = held_out.windows_at(np.array([window]))
        logits = trainer.model(trainer.tools.to_device(batch.tokens, "cpu")).detach().double().numpy()[0]
        for row, label in zip(logits, batch.labels[0], strict=True):
            if label >= 0:
                total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[label]
                count += 1
    return total / count, count


def first_validation(arguments: list[str]) -> tuple[float, int]:
    """In a worker: what the Validator says of the same model."""
    options = parse_train_options(arguments)
    degrees = options.parallelism
    shape = (degrees.data_parallel_degree, degrees.tensor_parallel_degree)
    text, held_out = open_texts(options)
    trainer = Trainer(options, init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), text, held_out=held_out)
    assert trainer.validator is not None and trainer.validator.validation_context is trainer.train_context
    found = trainer.validator.run()
    assert trainer.model.training
    return found.loss, found.tokens


@pytest.mark.contract("C4")
@pytest.mark.parametrize(
    ("dp", "tp", "more"),
    [
        (1, 1, []),
        (1, 2, []),
        (2, 2, ["--training.loss", "chunked"]),
        (2, 1, ["--parallelism.data-parallel", "fsdp"]),
        (2, 1, ["--parallelism.data-parallel", "ddp"]),
    ],
)
def test_each_token_counts_once(dp: int, tp: int, more: list[str], text: Path) -> None:
    arguments = [*arguments_of(text), "--parallelism.data-parallel-degree", str(dp)]
    arguments += ["--parallelism.tensor-parallel-degree", str(tp), *more]
    alone = run_distributed(loss_token_by_token, arguments_of(text), platform="torch", world_size=1, timeout=60)[0]
    for loss, tokens in run_distributed(first_validation, arguments, platform="torch", world_size=dp * tp, timeout=60):
        assert tokens == alone[1]
        assert loss == pytest.approx(alone[0], rel=1e-6)


def test_validation_is_recorded_and_leaves_training_as_it_is(text: Path) -> None:
    with_it = train(text, 1, 2, *VALIDATION)
    without = train(text, 1, 2, "--validation.freq", "3", "--validation.held-out", "0.1", "--validation.steps", "1")
    assert list(with_it["validation_loss"]) == [2, 4] and list(without["validation_loss"]) == [3, 4]
    assert with_it["loss"] == without["loss"]
    assert with_it["validation_loss"][4] < with_it["validation_loss"][2]
    assert without["validation_tokens"][4] < with_it["validation_tokens"][4]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HYPER_PARALLEL_PLATFORM")
    env = {k: v for k, v in os.environ.items() if k not in foreign} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hyper_parallel", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_eval_of_a_checkpoint_is_the_last_validation(text: Path, tmp_path: Path) -> None:
    more = ["--checkpoint.enable", "--validation.data", str(text), "--validation.freq", "4", "--output", str(tmp_path)]
    trained = train(text, 2, 1, *more, "--parallelism.data-parallel", "fsdp")
    results = {}
    for name, degrees in {
        "tp 1": [],
        "tp 2": ["--nproc", "2", "--parallelism.tensor-parallel-degree", "2"],
    }.items():
        output = tmp_path / name
        options = [*(["--weights"] if degrees else []), str(tmp_path), "--data", str(text), "--output", str(output)]
        options += ["--batch-size", "4", "--sequence-length", "32", *degrees]
        done = run_cli("eval", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        results[name] = json.loads((output / "eval.json").read_text())
        assert f"loss {results[name]['loss']:.4f}, perplexity" in done.stdout
    for result in results.values():
        assert result["loss"] == pytest.approx(trained["validation_loss"][4], rel=1e-5)
        assert result["tokens"] == trained["validation_tokens"][4]


def test_without_a_text_of_its_own_eval_takes_what_the_run_was_validated_on(text: Path, tmp_path: Path) -> None:
    trained = train(text, 1, 1, "--checkpoint.enable", *VALIDATION, "--output", str(tmp_path / "run"))
    options = ["--batches", "0", "--batch-size", "4", "--sequence-length", "32", "--output", str(tmp_path / "out")]
    done = run_cli("eval", str(tmp_path / "run"), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on the end of {text}, which the run was validated on: all " in done.stdout
    found = json.loads((tmp_path / "out/eval.json").read_text())
    assert found["loss"] == pytest.approx(trained["validation_loss"][4], rel=1e-5)
    assert found["tokens"] == trained["validation_tokens"][4]
    assert "note: " not in done.stdout
    (text / "more.py").write_text("x = 1\n")
    done = run_cli("eval", str(tmp_path / "run"), *options, "--batches", "2")
    (text / "more.py").unlink()
    assert "note: there is another text now than the run has read" in done.stdout
    assert "validated on: the first 2 of " in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "out/eval.json").read_text())["tokens"] <= 2 * 4 * 32


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({}, "the source of Python's standard library, which the run was trained on"),
        ({"data": "a", "validation": {"freq": 0, "data": "b", "held_out": 0.1}}, "a, which the run was trained on"),
        ({"data": "a", "validation": {"freq": 2, "data": "b", "held_out": 0.1}}, "b, which the run was validated on"),
        (
            {"data": "a", "validation": {"freq": 2, "data": None, "held_out": 0.1}},
            "the end of a, which the run was validated on",
        ),
    ],
)
def test_what_eval_reads_when_nobody_says(run: dict[str, object], said: str) -> None:
    state = TrainState(3, 3, {}, {}, "torch", [], run, {})
    data, validation, words = _what_to_read(EvalOptions(), state)
    assert words == said and (validation is not None) == said.startswith("the end")
    assert data is None or str(data) in words.replace("the end of ", "").split(",")
    assert _what_to_read(EvalOptions(data=Path("c")), state) == (Path("c"), None, "c")
    assert _what_to_read(EvalOptions(), None) == (None, None, "the source of Python's standard library")


def test_a_text_that_nobody_named_is_looked_at_in_part() -> None:
    assert EvalOptions().max_batches == 100 and EvalOptions(data=Path("c")).max_batches == 0
    assert EvalOptions(batches=0).max_batches == 0 and EvalOptions(batches=7, data=Path("c")).max_batches == 7
    with pytest.raises(ValueError, match="batches must be at least 0, found -1"):
        EvalOptions(batches=-1)


def test_the_text_of_the_run_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"data": str(tmp_path / "gone")}
    weights = checkpoint_of(tmp_path / "step_000003", run=run)
    assert cli.main(["eval", str(weights), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'gone'}" in error and "name another text with --data" in error


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(eval_progress.time, "monotonic", lambda: now)
    progress = eval_progress.EvalProgress(1200)
    for _ in range(480):
        now += 1 / 16
        progress.step()
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "160 of 1,200 batches, 65 s left" and len(lines) == 3


def checkpoint_of(folder: Path, run: Mapping[str, object] | None = None, **text: object) -> Path:
    """A checkpoint without tensors, of a run with these options, and these of its text."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text(json.dumps(LlamaConfig().to_hf()))
    state = TrainState(3, 3, {}, {}, "torch", [], {"text": {"cache": "elsewhere", **text}, **(run or {})}, {})
    (folder / "state.json").write_text(state.encode())
    files = {name: FileFacts.of(folder / name) for name in ("state.json", "model/config.json")}
    Manifest(3, files).write(folder)
    return folder


def test_text_is_read_as_in_training_except_for_what_is_said(tmp_path: Path) -> None:
    of_the_run = {"tokenizer": "tok/a.json", "bos_token": "<s>", "document_masks": True, "field": "body"}
    weights = checkpoint_of(tmp_path / "step_000003", **of_the_run)

    def text(*more: str) -> TextOptions:
        arguments = ["--weights", str(weights), *more]
        return _find(parse_options(EvalOptions, "eval", arguments), arguments).options.text

    expected = TextOptions(tokenizer=Path("tok/a.json"), bos_token="<s>", document_masks=True, field="body")
    assert text() == expected
    assert text("--text.prefetch", "0") == replace(expected, prefetch=0)
    assert text("--text.field", "text", "--text.bos-token", "None") == replace(expected, field="text", bos_token=None)
    assert text("--text.no-document-masks", "--text.format", "jsonl") == replace(
        expected, document_masks=False, format="jsonl"
    )
    state = weights / "state.json"
    state.write_text(state.read_text().replace("body", "bode"))
    with pytest.raises(UsageError, match=r"cannot evaluate .*state.json is damaged"):
        text()


def check(path: str) -> None:
    """In a worker."""
    check_weights(Path(path), every_rank(), get_weight_backend().empty_on("cpu"))


def test_weights_are_compared_with_their_checksums(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path / "step_000003")
    run_distributed(check, str(folder), world_size=2)
    config = folder / "model/config.json"
    config.write_text(config.read_text().replace("silu", "gelu"))
    for error in run_distributed(check, str(folder), world_size=2, expect_error=True):
        assert error.type == "CheckpointError" and "model/config.json is damaged" in str(error.message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothere"], "eval: there is no nothere: expected a Hugging Face folder, a checkpoint"),
        ([], "eval needs a Hugging Face folder, a checkpoint of training, or a run"),
        (["--weights", "/nowhere/at/all"], "cannot evaluate /nowhere/at/all: no checkpoint"),
    ],
)
def test_wrong_usage_of_eval(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err
