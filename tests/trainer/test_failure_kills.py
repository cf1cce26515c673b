"""Jobs that are killed while they write checkpoints: nobody hangs, and what is left is a whole checkpoint.

The ordinary suite does two; with ``HYPOTHESIS_PROFILE=nightly`` there are twenty of each kind.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_parallel.trainer.checkpoint_read import open_whole_checkpoint
from tests.trainer.checkpoint_jobs import command, steps_in, steps_logged, train, write_text

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
TORCH, MINDSPORE = (pytest.param(name, marks=pytest.mark.platform(name)) for name in ("torch", "mindspore"))
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
REPETITIONS = 20 if NIGHTLY else 1
LONG = ["--steps", "100000", "--checkpoint.enable", "--checkpoint.interval", "1", "--optimizer.lr", "1e-3"]
SECONDS = 10.0
"""Nobody may take longer to end."""

POINTS: dict[str, tuple[str, str]] = {
    "a rank, in the tensors": ("rank 1", "model/model-*"),
    "a rank, in the list": ("rank 0", "manifest.json"),
    "the launcher, in the tensors": ("launcher", "optimizer/model-*"),
    "the launcher, in the state": ("launcher", "state.json"),
    "a rank, at any time": ("rank 0", ""),
    "the launcher, at any time": ("launcher", ""),
}


def worker_pids(launcher: int) -> dict[int, int]:
    """Rank -> process id."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = dict(v.split("=", 1) for v in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in v)
        if "RANK" in variables:
            found[int(variables["RANK"])] = int(pid)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float, pause: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"it did not come to that: {process.communicate()[0]}")
        time.sleep(pause)


def kill_at(point: str, root: Path, output: str, rng: random.Random, platform: str) -> str:
    """Start a job, kill it at the point, wait until all of it has ended; returns what it said."""
    victim, file = POINTS[point]
    folder = root / output / "checkpoints"
    process = command(root, output, *LONG, platform=platform)
    try:
        wait_for(lambda: steps_in(root, output), process, 60, 0.01)
        workers = worker_pids(process.pid)
        if file:
            wait_for(lambda: next(folder.glob(f".step_*.part/{file}"), None), process, 30, 0.0)
        else:
            time.sleep(rng.uniform(0, 0.5))
        began = time.monotonic()
        os.kill(process.pid if victim == "launcher" else workers[int(victim[-1])], signal.SIGKILL)
        out, _ = process.communicate(timeout=SECONDS)
        while any(is_running(pid) for pid in workers.values()):
            assert time.monotonic() - began < SECONDS, "a worker lives on"
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode != 0
    if victim != "launcher":
        assert f"{victim} failed: it was killed by SIGKILL" in out.splitlines()[-1]
    return out


@pytest.mark.parametrize("repetition", range(REPETITIONS))
@pytest.mark.parametrize("point", POINTS if NIGHTLY else ["a rank, in the tensors", "the launcher, in the state"])
@pytest.mark.parametrize("platform", [TORCH, MINDSPORE] if NIGHTLY else [TORCH])
def test_a_killed_job_leaves_whole_checkpoints_and_goes_on_from_the_last(
    platform: str, point: str, repetition: int, tmp_path: Path
) -> None:
    write_text(tmp_path / "text")
    kill_at(point, tmp_path, "run", random.Random(repetition), platform)
    steps = steps_in(tmp_path, "run")
    assert steps
    for step in steps:
        path = tmp_path / f"run/checkpoints/step_{step:06d}"
        manifest, state = open_whole_checkpoint(path)
        manifest.check_content(path, manifest.files)
        assert state.step == step
    last = steps[-1]
    goal = ["--steps", str(last + 2), *LONG[2:]]
    expected = train(tmp_path, "from the last", "--checkpoint.resume", str(tmp_path / "run"), *goal, platform=platform)
    losses = train(tmp_path, "run", *goal, platform=platform)
    assert {step: losses[step] for step in (last + 1, last + 2)} == expected
    assert steps_logged(tmp_path, "run") == list(range(1, last + 3))
    assert not [p for p in (tmp_path / "run/checkpoints").iterdir() if p.name.startswith(".")]


@pytest.mark.platform("torch")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM] if NIGHTLY else [signal.SIGTERM])
def test_a_signal_saves_after_the_step(number: signal.Signals, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    seldom = ["--steps", "100000", "--checkpoint.enable", "--checkpoint.interval", "50000"]
    process = command(tmp_path, "run", *seldom, "--training.log-interval", "1")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process, 60, 0.01)
    began = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=SECONDS)
    assert time.monotonic() - began < SECONDS and process.returncode == 128 + number, out
    assert "Traceback" not in out
    assert steps_in(tmp_path, "run") == steps_logged(tmp_path, "run")[-1:]
    assert f"the same command goes on after step {steps_in(tmp_path, 'run')[0]}" in out


@pytest.mark.platform("torch")
def test_a_last_checkpoint_that_fails_is_an_error(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    seldom = ["--steps", "100000", "--checkpoint.enable", "--checkpoint.interval", "50000"]
    process = command(tmp_path, "run", *seldom, "--training.log-interval", "1")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text(), process, 60, 0.01)
    (tmp_path / "run/checkpoints").write_text("in the way")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    last = out.splitlines()[-1]
    assert "failed: CheckpointError: rank 0: cannot write" in last and "checkpoints" in last
