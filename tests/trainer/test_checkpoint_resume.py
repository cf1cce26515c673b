"""A run that goes on from a checkpoint does what the uninterrupted run does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.tensor_parallel.checkpoint_files import open_checkpoint
from hyper_parallel.tensor_parallel.checkpoint_reader import get_slice
from hyper_parallel.trainer.command_line import parse_train_options
from hyper_parallel.trainer.job import run_worker
from hyper_parallel.trainer.summary import RunSummary, read_losses
from tests.harness import run_distributed
from tests.trainer.checkpoint_jobs import (
    EVERY_2,
    STEPS,
    arguments_of,
    failures,
    steps_in,
    steps_logged,
    train,
    write_text,
)

pytestmark = pytest.mark.platform("torch")
ALL = list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> dict[int, float]:
    """The losses of a run at tp 2 that left checkpoints after steps 2, 4 and 6."""
    losses = train(root, "whole", *EVERY_2)
    assert steps_in(root, "whole") == [2, 4, 6] and list(losses) == ALL
    return losses


def test_what_a_checkpoint_is_made_of(root: Path, whole: dict[int, float]) -> None:
    folder = root / "whole/checkpoints/step_000004"
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == state["updates"] == state["data"]["step"] == 4
    assert len(state["rng"]) == 2 and state["versions"]["torch"] and state["options"]["seed"] == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert there == {*manifest["files"], "manifest.json"}
    index = json.loads((folder / "optimizer/model.safetensors.index.json").read_text())["weight_map"]
    assert {"lm_head.weight.exp_avg", "lm_head.weight.exp_avg_sq"} <= index.keys()
    assert len(set(index.values())) > 1, "all tensors were written by one rank"
    assert not any("pkl" in name or name.endswith((".pt", ".bin")) for name in there)
    assert not [p for p in (root / "whole/checkpoints").iterdir() if p.name.startswith(".")]


def test_the_same_ranks_go_on_bit_by_bit(root: Path, whole: dict[int, float]) -> None:
    losses = train(root, "same", "--checkpoint.resume", str(root / "whole/checkpoints/step_000004"))
    assert losses == {step: whole[step] for step in (5, 6)}
    # what an older run has left in the output folder is not taken for the beginning of this one
    metrics = root / "same/metrics.jsonl"
    metrics.write_text('{"step": 3, "loss": 0.5}\n' + metrics.read_text())
    again = train(root, "same", "--checkpoint.resume", str(root / "whole/checkpoints/step_000004"))
    summary = RunSummary.read(root / "same")
    assert again == losses and (summary.first_loss, summary.start, summary.steps) == (losses[5], 4, 6)
    before = metrics.read_bytes()
    for error in failures(root, "same", "--checkpoint.resume", str(root / "whole")):
        assert "nothing to train: the checkpoint is of step 6 of 6" in error.message
    assert metrics.read_bytes() == before


def test_data_parallel_ranks_go_on_bit_by_bit(root: Path, whole: dict[int, float]) -> None:
    before = train(root, "dp", *EVERY_2, degrees=(2, 2))
    assert before == pytest.approx(whole, abs=1e-4)
    after = train(root, "dp after", "--checkpoint.resume", str(root / "dp/checkpoints/step_000002"), degrees=(2, 2))
    assert after == {step: before[step] for step in (3, 4, 5, 6)}


@pytest.mark.parametrize("degrees", [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_other_numbers_of_ranks_go_on_as_well(degrees: tuple[int, int], root: Path, whole: dict[int, float]) -> None:
    last = root / "whole/checkpoints/step_000004"
    losses = train(root, f"{degrees}", "--checkpoint.resume", str(last), degrees=degrees)
    assert losses == pytest.approx({step: whole[step] for step in (5, 6)}, abs=1e-4)


@pytest.mark.parametrize("degrees", [(2, 1), (2, 2)])
def test_what_fsdp_has_sharded_goes_on(degrees: tuple[int, int], root: Path, whole: dict[int, float]) -> None:
    """With a validation before each checkpoint, after which FSDP2 would keep the last layer whole; at the same ranks
    bit by bit, at others and from others within the tolerance; the files are those of any other run.
    """
    fsdp = ["--parallelism.data-parallel", "fsdp", "--validation.freq", "2", "--validation.data", str(root / "text")]
    fsdp += ["--validation.steps", "1"]
    name = f"fsdp {degrees}"
    before = train(root, name, *fsdp, *EVERY_2, degrees=degrees)
    assert before == pytest.approx(whole, abs=1e-4) and steps_in(root, name) == [2, 4, 6]
    own = ["--checkpoint.resume", str(root / name / "checkpoints/step_000004")]
    last = {step: whole[step] for step in (5, 6)}
    assert train(root, f"{name} after", *fsdp, *own, degrees=degrees) == {step: before[step] for step in (5, 6)}
    assert train(root, f"{name} to tp", *own) == pytest.approx(last, abs=1e-4)
    theirs = ["--checkpoint.resume", str(root / "whole/checkpoints/step_000004")]
    assert train(root, f"to {name}", *fsdp, *theirs, degrees=degrees) == pytest.approx(last, abs=1e-4)
    for kind in ("model", "optimizer"):
        found, expected = (tensors_of(root / run / "checkpoints/step_000006" / kind) for run in (name, "whole"))
        assert found.keys() == expected.keys()
        assert all(np.abs(found[key] - expected[key]).max() < 1e-3 for key in expected)
    index = json.loads((root / name / "checkpoints/step_000004/model/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1, "all tensors were written by one rank"


@pytest.mark.parametrize(
    ("first", "second", "degrees", "later"),
    [("fsdp", "ddp", (2, 1), (2, 1)), ("ddp", "fsdp", (2, 1), (2, 1)), ("ddp", "replicate", (2, 2), (1, 2))],
)
def test_another_way_of_data_parallelism_goes_on(
    first: str, second: str, degrees: tuple[int, int], later: tuple[int, int], root: Path
) -> None:
    """The same update in float32, whose sums over rows, tokens and ranks are taken in another order: about 1e-6 of a
    loss of 5, which two more updates at a learning rate of 1e-2 make no more than 1e-4.
    """
    way = "--parallelism.data-parallel"
    before = train(root, f"{first} before", *EVERY_2, way, first, degrees=degrees)
    last = str(root / f"{first} before/checkpoints/step_000004")
    after = train(root, f"{first} then {second}", "--checkpoint.resume", last, way, second, degrees=later)
    assert after == pytest.approx({step: before[step] for step in (5, 6)}, abs=1e-4)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    return {key: get_slice(checkpoint, key)[...] for key in checkpoint.tensors}


def losses_with_chance(arguments: list[str]) -> dict[int, float]:
    """In a worker: a loss that draws random numbers in every step."""
    import torch

    from hyper_parallel.trainer.loss import CrossEntropyLoss

    def loss(logits: Any, labels: Any, valid: int) -> Any:
        return CrossEntropyLoss()(logits, labels, valid) * (1 + 0.1 * torch.rand(()))

    options = parse_train_options(arguments)
    run_worker(options, loss=loss)
    return read_losses(options.output / "metrics.jsonl")


def test_random_numbers_go_on_where_they_were(root: Path, whole: dict[int, float]) -> None:
    def losses(output: str, *more: str) -> dict[int, float]:
        found: dict[int, float] = run_distributed(losses_with_chance, arguments_of(root, output, *more), timeout=60)[0]
        return found

    before = losses("chance", *EVERY_2)
    assert before[1] != whole[1]
    after = losses("chance after", "--checkpoint.resume", str(root / "chance/checkpoints/step_000004"))
    assert after == {step: before[step] for step in (5, 6)}


@pytest.mark.parametrize("first", ["bfloat16", "float32"])
def test_a_run_goes_on_in_another_precision(first: str, root: Path, whole: dict[int, float]) -> None:
    second = "float32" if first == "bfloat16" else "bfloat16"
    train(root, first, *EVERY_2, "--training.mixed-precision-param", first)
    last = root / first / "checkpoints/step_000004"
    options = ["--checkpoint.resume", str(last), "--training.mixed-precision-param", second]
    # bfloat16 has 8 bits: the two runs are as far apart as their first losses would be
    assert train(root, f"{first} then", *options) == pytest.approx({s: whole[s] for s in (5, 6)}, abs=5e-2)


def test_a_run_goes_on_by_itself_and_keeps_its_metrics(root: Path, whole: dict[int, float]) -> None:
    shutil.copytree(root / "whole", root / "again")
    shutil.rmtree(root / "again/checkpoints/step_000006")
    (root / "again/checkpoints/.step_000006.0.part").mkdir()
    with open(root / "again/metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # a line cut short by a kill
    assert train(root, "again", *EVERY_2) == whole
    assert steps_logged(root, "again") == ALL and steps_in(root, "again") == [2, 4, 6]
    assert not [p for p in (root / "again/checkpoints").iterdir() if p.name.startswith(".")]


def test_a_complete_run_is_left_as_it_is(
    root: Path, whole: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    def contents() -> dict[str, tuple[int, bytes]]:
        files = [p for p in (root / "whole").rglob("*") if p.is_file()]
        return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}

    before = contents()
    assert train(root, "whole", *EVERY_2) == whole  # as under torchrun
    assert main(["train", *arguments_of(root, "whole", *EVERY_2), "--nproc", "2"]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"the job in {root / 'whole'} is complete: step 6 of 6; nothing was done\nto go on, raise ")
    again = ["train", *arguments_of(root, "whole", *EVERY_2), "--nproc", "2"]
    assert main([*again, "--optimizer.lr", "1", "--plan", "last_layer"]) == 0
    said = capfd.readouterr().out
    assert "without effect: optimizer.lr 0.01 -> 1.0" in said and "effect: plan 'auto' -> 'last_layer'" in said
    other = write_text(root / "other text")
    (other / "more.py").write_text("more")
    for options, message in (
        (["--seed", "1"], "the position in the text was taken with seed 0; here it is 1"),
        (["--data", str(other)], "the position in the text was taken with text "),
        (["--model.hidden-size", "64"], "the checkpoint holds another model: model.hidden_size 32 -> 64"),
    ):
        assert main([*again, *options]) == 2
        assert f"hyper-parallel train: {message}" in capfd.readouterr().err
    for error in failures(root, "whole", *EVERY_2, "--seed", "1"):
        assert "was taken with seed 0; here it is 1" in error.message
    assert {path: kept for path, kept in contents().items() if path in before} == before


def test_the_last_k_are_kept(root: Path) -> None:
    options = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep-latest-k", "2"]
    train(root, "few", *options, degrees=(1, 1))
    assert steps_in(root, "few") == [5, 6]


def test_a_new_run_does_not_write_among_checkpoints_of_another(root: Path, whole: dict[int, float]) -> None:
    kept = [*EVERY_2, "--checkpoint.resume"]
    for how in ("none", str(root / "whole/checkpoints/step_000002")):
        errors = failures(root, "whole", *kept, how)
        assert all("holds step_000006 of another run" in str(e.message) for e in errors)
    assert steps_in(root, "whole") == [2, 4, 6]


def test_a_run_without_checkpoints_is_kept_from_a_folder_that_has_some(
    root: Path, whole: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    message = "holds step_000006 of an earlier run, which would be taken for one of this run; remove it"
    assert main(["train", *arguments_of(root, "whole"), "--nproc", "2"]) == 2
    said = capfd.readouterr()
    assert message in said.err and "starting" not in said.out and len(said.err.splitlines()) == 1
    assert all(message in str(error.message) for error in failures(root, "whole"))
    # nor does it go on from an early one of them, with the later ones left there
    early = ["--checkpoint.resume", str(root / "whole/checkpoints/step_000002"), "--optimizer.lr", "2e-2"]
    assert all(message in str(error.message) for error in failures(root, "whole", *early))
    assert read_losses(root / "whole/metrics.jsonl") == whole


def test_checkpoints_may_lie_on_another_disk(root: Path) -> None:
    (root / "disk").mkdir()
    (root / "linked").mkdir()
    (root / "linked/checkpoints").symlink_to(root / "disk")
    first = train(root, "linked", *EVERY_2, "--steps", "4")
    assert steps_in(root, "linked") == [2, 4]
    both = train(root, "linked", *EVERY_2)
    assert sorted(both) == [1, 2, 3, 4, 5, 6] and {step: both[step] for step in first} == first


def test_what_cannot_go_on_is_said_before_anything_starts(
    root: Path, whole: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    again = ["train", *arguments_of(root, "whole", *EVERY_2), "--nproc", "2", "--steps", "8"]
    path = root / "whole/checkpoints/step_000006"
    for options, message in (
        (["--training.sequence-length", "8"], f"cannot go on from {path}: the position in the text was taken with "),
        (["--model.hidden-size", "64"], f"cannot go on from {path}: the checkpoint holds another model: model.hidd"),
        (["--checkpoint.resume", "none"], "holds step_000006 of another run, and this one begins anew"),
        (["--checkpoint.resume", str(root / "text")], f"no checkpoint at {root / 'text'}"),
    ):
        assert main([*again, *options]) == 2
        said = capfd.readouterr()
        assert message in said.err and "starting" not in said.out and len(said.err.splitlines()) == 1
