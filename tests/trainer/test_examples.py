"""The examples do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.trainer.command_line import parse_train_options, read_options_file
from hyper_parallel.trainer.job import run_worker
from hyper_parallel.trainer.launcher import run_job
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import RunSummary, read_losses
from tests.harness import run_distributed

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "examples").glob("*.yaml"))


def test_the_options_file_spells_out_the_defaults() -> None:
    assert read_options_file(ROOT / "examples" / "llama_bytes.yaml") == TrainOptions()


def train_here(arguments: list[str]) -> dict[int, float]:
    """In a worker of the harness."""
    before = Path.cwd()
    os.chdir(ROOT)  # the examples name their data from there
    try:
        options = parse_train_options(arguments)
        run_worker(options)
    finally:
        os.chdir(before)
    return read_losses(options.output / "metrics.jsonl")


@pytest.mark.platform("torch")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_options_file_trains(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / name
    options = read_options_file(path)
    arguments = [str(path), "--output", str(tmp_path), "--steps", "3", "--training.log-interval", "1"]
    degrees = options.parallelism
    assert degrees.data_parallel_degree * degrees.tensor_parallel_degree == options.nproc
    losses = run_distributed(
        train_here, arguments, platform=options.backend, world_size=options.nproc, timeout=60
    )[0]  # fmt: skip
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]
    assert str(options.output) == f"outputs/{path.stem}_torch"


@pytest.mark.platform("torch")
def test_the_command_trains_on_json_lines_with_their_tokenizer(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "HYPER_PARALLEL_PLATFORM")}
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel", "train", "examples/llama_fables.yaml", "--steps", "6"]
        + ["--output", str(tmp_path), "--training.log-interval", "3"],
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2,985 tokens of text, mesh (dp=1, tp=2), loss parallel on" in done.stdout
    assert done.stdout.count("\nstep ") == 2 and f"{tmp_path}/loss.png" in done.stdout
    summary = RunSummary.read(tmp_path)
    assert summary.steps == 6 and summary.last_loss < summary.first_loss


@pytest.mark.platform("torch")
def test_the_script_finds_the_loss_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = str(ROOT / "examples" / "loss_parallel_torch.py")
    run_job([sys.executable, script], nproc=2, backend="torch", log_folder=tmp_path)
    lines = [capfd.readouterr().out, (tmp_path / "rank1.log").read_text()]
    for rank, (line, classes) in enumerate(zip(lines, (130, 129), strict=True)):
        assert f"rank {rank} holds {classes} of 259 classes" in line
        loss, expected = (
            float(part.split()[0].strip(",")) for part in (line.split("loss ")[1], line.split("device ")[1])
        )
        assert loss == pytest.approx(expected, rel=1e-6)
