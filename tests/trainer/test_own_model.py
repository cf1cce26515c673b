"""A model and a loss of one's own, from a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.trainer.launcher import run_job
from hyper_parallel.trainer.summary import read_losses

ROOT = Path(__file__).resolve().parents[2]


TORCH, MINDSPORE = "train_own_model.py", "train_own_model_mindspore.py"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(TORCH, marks=pytest.mark.platform("torch")),
        pytest.param(MINDSPORE, marks=pytest.mark.platform("mindspore")),
    ],
)
def test_the_example_says_what_it_is(name: str) -> None:
    script = [sys.executable, str(ROOT / "examples" / name), "--help"]
    said = subprocess.run(script, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0 and "model and a loss of one's own in the trainer" in said.stdout


@pytest.mark.parametrize(
    ("name", "backend", "number"),
    [
        pytest.param(TORCH, "torch", 4, marks=pytest.mark.platform("torch")),
        pytest.param(MINDSPORE, "mindspore", 2, marks=pytest.mark.platform("mindspore")),
    ],
)
def test_a_model_of_ones_own_trains_alike_on_one_rank_and_on_several(
    name: str, backend: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    losses = []
    for ranks in (1, number):
        script = [sys.executable, str(ROOT / "examples" / name)]
        run_job(script, nproc=ranks, backend=backend, log_folder=tmp_path / "logs")
        losses.append(read_losses(tmp_path / "outputs" / "own_model" / "metrics.jsonl"))
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)  # some dozens of steps apart
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-5) and losses[0][max(losses[0])] < losses[0][1] / 2
