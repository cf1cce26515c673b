"""The loss on accelerators, one process a device; the same job on CPU shows that it can be run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.trainer.launcher import run_job
from tests.harness.platforms import why_not_here


def count(tool: str, *arguments: str) -> int:
    """How many devices a vendor's tool lists; 0 without it."""
    if shutil.which(tool) is None:
        return 0
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)
    return len(done.stdout.split("\n")) - 1 if done.returncode == 0 else 0


def run(platform: str, device: str, ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-m", "tests.devices.loss_job", device]
    run_job(command, nproc=ranks, backend=platform, log_folder=folder)


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_cpu(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_not_here(platform):
        pytest.skip(reason)
    run(platform, "cpu", 2, tmp_path, monkeypatch)


@pytest.mark.contract("G1", "G2", "K1", "K2", "K3", "R2")
@pytest.mark.platform("torch")
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (devices := count("nvidia-smi", "--list-gpus")):
        pytest.skip("needs an NVIDIA GPU")
    run("torch", "cuda", min(devices, 4), tmp_path, monkeypatch)


@pytest.mark.contract("G1", "G2", "K1", "K2", "K3", "R2", "TRAP13")
@pytest.mark.platform("mindspore")
def test_npus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (devices := count("npu-smi", "info", "-m")):
        pytest.skip("needs an Ascend device")
    run("mindspore", "npu", min(devices, 4), tmp_path, monkeypatch)
