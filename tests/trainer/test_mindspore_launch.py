"""MindSpore jobs in processes: ranks and scheduler are started, watched and ended, by this library or by msrun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.trainer.launch_environment import is_scheduler, is_worker, plan_processes, without_launcher
from hyper_parallel.trainer.launcher import JobFailed, run_job
from hyper_parallel.trainer.summary import RunSummary
from tests.trainer.small_jobs import TINY, train, write_text

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, signal, sys, time
import numpy as np
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.launch_environment import is_scheduler
from hyper_parallel.trainer.worker import run_guarded
def work():
    platform = get_platform("mindspore")
    platform.ensure_initialized("cpu")
    if is_scheduler(os.environ):
        return 0
    group = platform.create_group([tuple(range(platform.world_size()))])
    for step in range(10**6):
        platform.all_reduce(platform.from_numpy(np.ones(3, np.float32)), "sum", group)
        if step == 20:
            open({started!r}, "w").close()
        if step == 20 and platform.rank() == 1:
            {end}
    return 0
sys.exit(run_guarded(work))
"""
ENDS = {
    "raises": ("raise RuntimeError('no such luck')", "rank 1 failed: RuntimeError: no such luck"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 failed: it was killed by SIGKILL"),
}


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {k: v for k, v in without_launcher(dict(os.environ)).items() if k != "HYPER_PARALLEL_PLATFORM"}
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}


def test_every_process_learns_its_place() -> None:
    scheduler, *ranks = plan_processes("mindspore", 3, 5000)
    assert scheduler.rank is None and is_scheduler(scheduler.environment) and is_worker(scheduler.environment)
    assert [p.rank for p in ranks] == [0, 1, 2] and not any(is_scheduler(p.environment) for p in ranks)
    for plan in (scheduler, *ranks):
        assert plan.environment["MS_WORKER_NUM"] == "3" and plan.environment["MS_SCHED_PORT"] == "5000"
    assert [p.environment["MS_NODE_ID"] for p in ranks] == ["0", "1", "2"]
    assert not is_worker(without_launcher(ranks[1].environment))


def test_one_process_meets_nobody() -> None:
    (plan,) = plan_processes("mindspore", 1, 5000)
    assert plan.rank == 0 and is_worker(plan.environment) and "MS_ROLE" not in plan.environment


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown backend 'jax'; expected one of .'torch', 'mindspore'."):
        plan_processes("jax", 2, 5000)


@pytest.mark.platform("mindspore")
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_fails_is_named_and_ends_the_job(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    end, message = ENDS[how]
    started = tmp_path / "started"
    with pytest.raises(JobFailed) as raised:
        run_job(
            [sys.executable, "-c", WORKER.format(started=str(started), end=end)],
            nproc=2,
            backend="mindspore",
            log_folder=tmp_path,
        )
    assert time.time() - started.stat().st_mtime < 10
    assert str(raised.value).startswith(message)


LEAVES = """
import os, sys, time
import numpy as np
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.trainer.launch_environment import is_scheduler
from hyper_parallel.trainer.worker import run_guarded
def work():
    platform = get_platform("mindspore")
    platform.ensure_initialized("cpu")
    if is_scheduler(os.environ):
        return 0
    tools = load_training_tools()
    group = platform.create_group([tuple(range(platform.world_size()))])
    platform.all_reduce(platform.from_numpy(np.ones(3, np.float32)), "sum", group)
    time.sleep({late} * platform.rank())
    began = time.time()
    tools.close()
    open({folder!r} + f"/{{platform.rank()}}", "w").write(f"{{began}} {{time.time()}}")
    return 0
sys.exit(run_guarded(work))
"""


@pytest.mark.platform("mindspore")
@pytest.mark.parametrize("late", [1.0, 5.0])
def test_a_rank_leaves_when_the_others_are_done_and_waits_for_none_for_ever(
    late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = LEAVES.format(late=late, folder=str(tmp_path))
    run_job([sys.executable, "-c", code], nproc=2, backend="mindspore", log_folder=tmp_path / "logs")
    (began, left), (other, end) = [tuple(map(float, (tmp_path / str(r)).read_text().split())) for r in range(2)]
    if late < 3:
        assert left > other
    else:
        assert left < other and left - began < 6 and end - other < 6


@pytest.mark.platform("mindspore")
def test_ctrl_c_ends_the_job_after_a_step(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    output = tmp_path / "out"
    line = ["-m", "hyper_parallel", "train", "--backend", "mindspore", "--data", str(text), "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, *line, *TINY, "--steps", "100000"],
        env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 130 and "stopped by SIGINT" in out and "Traceback" not in out, out
    summary = RunSummary.read(output)
    assert summary.interrupted and summary.backend == "mindspore" and summary.processes == 2


def start_msrun(folder: Path, *program: str) -> subprocess.Popen[str]:
    """Two ranks; what they say, and what msrun says, is one stream."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    msrun = shutil.which("msrun", path=environment()["PATH"])
    assert msrun is not None
    line = "--worker_num 2 --local_worker_num 2 --join True --cluster_time_out 60 --log_dir logs".split()
    return subprocess.Popen(
        [msrun, *line, "--master_port", str(port), "python", *program],
        env=environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.platform("mindspore")
def test_it_runs_under_msrun_as_it_is(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    job = ["-m", "hyper_parallel", "train", "--backend", "mindspore", "--data", str(text), "--output", "out", *TINY]
    process = start_msrun(tmp_path, *job, "--steps", "4")
    said, _ = process.communicate(timeout=180)
    said += "".join(p.read_text() for p in (tmp_path / "logs").glob("*.log"))
    assert process.returncode == 0 and "failed" not in said, said
    summary = RunSummary.read(tmp_path / "out")
    assert summary.steps == 4 and summary.processes == 2


ENDS_UNDER_MSRUN = {
    "raises": ENDS["raises"],
    "is killed": (ENDS["is killed"][0], "rank 1 failed: it ended before its work was done"),
    "ends with status 0": ("os._exit(0)", "rank 1 failed: it ended before its work was done"),
}


@pytest.mark.platform("mindspore")
@pytest.mark.parametrize("how", ENDS_UNDER_MSRUN)
def test_a_rank_that_fails_under_msrun_is_named_and_ends_the_job(how: str, tmp_path: Path) -> None:
    end, message = ENDS_UNDER_MSRUN[how]
    started, program = tmp_path / "started", tmp_path / "program.py"
    program.write_text(WORKER.format(started=str(started), end=end))
    process = start_msrun(tmp_path, str(program))
    said, _ = process.communicate(timeout=120)
    assert time.time() - started.stat().st_mtime < 10
    assert process.returncode != 0
    assert f"ERROR: {message}" in said.splitlines() or f"ERROR: {message} (the system" in said, said


DEFAULT = (
    "--steps 20 --training.batch-size 8 --training.sequence-length 128 --model.hidden-size 128 "
    "--model.intermediate-size 352 --model.num-attention-heads 4 --model.num-key-value-heads 2 --optimizer.lr 1e-3 "
    "--optimizer.warmup-steps 20 --training.max-grad-norm 1.0"
).split()
"""The sizes of the job as it comes."""


@pytest.mark.platform("mindspore")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_job_as_it_comes_has_the_losses_of_pytorch(world_size: int, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    expected = train(text, 1, 2, *DEFAULT, timeout=60)
    found = train(text, 1, world_size, *DEFAULT, platform="mindspore", timeout=120)
    assert len(found["loss"]) == 20
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
