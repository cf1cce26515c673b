"""The roll that ranks under msrun keep: who vanishes in the middle of its work is named, and ends the job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyper_parallel.trainer.roll import sign_in

ROOT = Path(__file__).resolve().parents[2]
WORK = """
import os, signal, sys, time
from hyper_parallel.trainer.worker import run_guarded
def work():
    {body}
    return 0
sys.exit(run_guarded(work))
"""
WAIT = "time.sleep(60)"
ENDS = {
    "raises": ("raise ValueError('no such luck')", "failed: ValueError: no such luck"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "failed: it ended before its work was done"),
    "ends with status 0": ("os._exit(0)", "failed: it ended before its work was done"),
    "stops at a signal": ("return 130", "ended with exit status 130"),
    "leaves its work": ("sys.exit(0)", "failed: it ended before its work was done"),
}


def variables(folder: Path, rank: int | None) -> dict[str, str]:
    """Those of a process under msrun, as far as they matter."""
    own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "RANK_ID": str(rank)}
    if rank is None:
        own = {"MS_ROLE": "MS_SCHED"}
    address = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "5000"}
    return {**address, **own, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}


def start(folder: Path, rank: int | None, body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORK.format(body=body)],
        env={**os.environ, **variables(folder, rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@contextmanager
def scheduler(folder: Path, body: str = WAIT) -> Iterator[subprocess.Popen[str]]:
    """One that, as MindSpore's, lets no other thread run."""
    process = start(folder, None, body)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_left_empty(folder: Path) -> bool:
    """By the process that looks after the roll, which ends last."""
    deadline = time.monotonic() + 5
    while list(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not list(folder.iterdir())


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_fails_is_named_and_ends_the_job(how: str, tmp_path: Path) -> None:
    end, message = ENDS[how]
    with scheduler(tmp_path) as serving:
        other = start(tmp_path, 0, WAIT)
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("*/rank0")) and time.monotonic() < deadline:
            time.sleep(0.1)
        rank = start(tmp_path, 1, f"time.sleep(1)\n    {end}")
        said, _ = rank.communicate(timeout=20)
        began = time.monotonic()
        explained, _ = serving.communicate(timeout=30)
        other.communicate(timeout=30)
        assert time.monotonic() - began < 10
    assert explained.startswith(f"ERROR: rank 1 {message}")
    assert serving.returncode != 0 and other.returncode != 0
    if how == "raises":
        assert said.splitlines()[-1] == f"rank 1 {message}" and rank.returncode == 1
    assert is_left_empty(tmp_path)


def test_a_rank_that_vanishes_before_anybody_looks_is_named(tmp_path: Path) -> None:
    start(tmp_path, 1, "os._exit(0)").communicate(timeout=20)
    with scheduler(tmp_path) as serving:
        explained, _ = serving.communicate(timeout=30)
    assert explained.startswith("ERROR: rank 1 failed: it ended")


def test_ranks_that_do_their_work_end_nothing_and_leave_nothing(tmp_path: Path) -> None:
    with scheduler(tmp_path, "time.sleep(4)") as serving:
        ranks = [start(tmp_path, rank, f"time.sleep({rank})") for rank in range(2)]
        assert [rank.communicate(timeout=20)[0] for rank in ranks] == ["", ""]
        assert serving.communicate(timeout=20)[0] == ""
        assert [process.returncode for process in (*ranks, serving)] == [0, 0, 0]
    assert is_left_empty(tmp_path)


def test_what_another_job_has_left_ends_nothing(tmp_path: Path) -> None:
    start(tmp_path, 1, "os._exit(0)").communicate(timeout=20)
    (left,) = tmp_path.glob("*/rank1")
    os.utime(left, (time.time() - 60, time.time() - 60))
    with scheduler(tmp_path, "time.sleep(3)") as serving:
        assert serving.communicate(timeout=20)[0] == ""
    assert serving.returncode == 0


def test_only_ranks_under_msrun_sign_in() -> None:
    assert sign_in({}) is None
    assert sign_in({"RANK": "0", "WORLD_SIZE": "2"}) is None
    assert sign_in({"MS_ROLE": "MS_SCHED", "MS_NODE_ID": "0"}) is None


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / f"hyper_parallel_{os.getuid()}_127.0.0.1_5000").symlink_to(theirs)
    assert sign_in(variables(tmp_path, 0)) is None
    assert not list(theirs.iterdir())
