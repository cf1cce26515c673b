"""The examples do what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hyper_parallel.trainer.command_line import read_options_file
from hyper_parallel.trainer.launcher import run_job
from hyper_parallel.trainer.options import TrainOptions

ROOT = Path(__file__).resolve().parents[2]


def test_the_options_file_spells_out_the_defaults() -> None:
    assert read_options_file(ROOT / "examples" / "llama_bytes.yaml") == TrainOptions()


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
