"""The whole job in processes of its own: it learns, equals one process, and ends as it should when it is disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.trainer.command_line import parse_train_options
from hyper_parallel.trainer.job import run_worker
from hyper_parallel.trainer.summary import RunSummary, read_column, read_losses
from tests.harness import run_distributed

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--training.batch-size 4 --training.sequence-length 32 --training.log-interval 5 "
    "--model.hidden-size 32 --model.intermediate-size 64 --model.num-attention-heads 2 "
    "--model.num-key-value-heads 1 --optimizer.lr 1e-2 --optimizer.warmup-steps 2"
).split()

pytestmark = pytest.mark.platform("torch")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    for name in ("options.py", "text.py", "trainer.py"):
        (path / name).write_text((ROOT / "hyper_parallel/trainer" / name).read_text())
    return path


def environment() -> dict[str, str]:
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HYPER_PARALLEL_PLATFORM")
    kept = {k: v for k, v in os.environ.items() if k not in foreign}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(
    text: Path, *arguments: str, command: str = "train", launcher: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """The command, with small sizes; its output is one stream."""
    output = text.parent / "out"
    line = ["-m", "hyper_parallel", command, "--data", str(text), "--output", str(output), *TINY, *arguments]
    return subprocess.Popen(
        [sys.executable, *launcher, *line],
        env=environment(),
        cwd=text.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> str:
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return out


@pytest.mark.contract("L2", "C4")
def test_two_ranks_learn_and_equal_one_process(text: Path) -> None:
    out = finish(process := start(text, "--steps", "12", "--tolerance", "1e-4", command="compare"))
    assert process.returncode == 0, out
    folder = text.parent / "out"
    losses = read_losses(folder / "metrics.jsonl")
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1] - 0.5
    single = folder / "single_process" / "metrics.jsonl"
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["steps"] == 12
    for column, name in (("loss", "max_difference"), ("grad_norm", "max_grad_norm_difference")):
        ours, alone = read_column(folder / "metrics.jsonl", column), read_column(single, column)
        gap = max(abs(ours[step] - alone[step]) for step in ours)
        assert comparison[name] == gap < 1e-4
    assert f"maximum loss difference in 12 steps: {comparison['max_difference']:.2e} (step" in out
    assert f"maximum gradient norm difference: {comparison['max_grad_norm_difference']:.2e} (step" in out
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG") and f"{folder}/loss.png" in out
    assert "mesh (dp=1, tp=2), loss parallel on, 35,168 parameters: 18,720 on a rank" in out
    assert out.count("step    10 ") == 2 and f"{folder}/metrics.jsonl" in out
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert row.keys() == {
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "peak_memory_bytes"
    }  # fmt: skip
    assert row["peak_memory_bytes"] > 2**20 and row["tokens"] == 128


def losses_of(arguments: list[str]) -> dict[int, float]:
    """In a worker of the harness."""
    options = parse_train_options(arguments)
    run_worker(options)
    return read_losses(options.output / "metrics.jsonl")


ARRANGEMENTS = {
    "tp 2": (1, 2, []),
    "tp 3, the last layer alone": (1, 3, ["--plan", "last_layer"]),
    "tp 2, loss parallel off": (1, 2, ["--parallelism.disable-loss-parallel"]),
    "dp 2": (2, 1, []),
    "dp 2 x tp 2, accumulation": (2, 2, ["--training.gradient-accumulation", "2"]),
}


def train_in_harness(text: Path, dp: int, tp: int, arguments: list[str]) -> dict[int, float]:
    options = ["--data", str(text), "--output", str(text.parent / "out"), "--steps", "4", *TINY, *arguments]
    degrees = ["--parallelism.data-parallel-degree", str(dp), "--parallelism.tensor-parallel-degree", str(tp)]
    losses: dict[int, float] = run_distributed(losses_of, options + degrees, platform="torch", world_size=dp * tp)[0]
    return losses


@pytest.mark.contract("C1")
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement_of_ranks_gives_the_same_losses(name: str, text: Path) -> None:
    alone = train_in_harness(text, 1, 1, [])
    losses = train_in_harness(text, *ARRANGEMENTS[name])
    assert losses == pytest.approx(alone, abs=1e-5)


def test_it_runs_under_torchrun_as_it_is(text: Path) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --no-python".split()
    launcher = (*torchrun, sys.executable)
    out = finish(process := start(text, "--steps", "4", command="compare", launcher=launcher))
    assert process.returncode == 0, out
    summary = RunSummary.read(text.parent / "out")
    assert summary.steps == 4 and summary.processes == 2
    assert json.loads((text.parent / "out" / "comparison.json").read_text())["max_difference"] < 1e-5


def wait_for_steps(text: Path, process: subprocess.Popen[str]) -> None:
    """Until the job has reported something."""
    metrics = text.parent / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"no step in 60 seconds: {process.communicate()[0]}")


def worker_pids(launcher: int) -> dict[int, int]:
    """Rank -> process id."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = dict(v.split("=", 1) for v in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in v)
        found[int(variables["RANK"])] = int(pid)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
def test_a_killed_rank_is_named_and_ends_the_job(text: Path) -> None:
    process = start(text, "--steps", "1000000")
    wait_for_steps(text, process)
    workers = worker_pids(process.pid)
    began = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    out = finish(process, 20)
    assert time.monotonic() - began < 10
    assert process.returncode == 1
    assert "rank 1 failed: it was killed by SIGKILL" in out.splitlines()[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def test_ctrl_c_ends_the_job_after_a_step_and_keeps_the_metrics(text: Path) -> None:
    of_an_earlier_run = text.parent / "out" / "comparison.json"
    of_an_earlier_run.parent.mkdir(parents=True)
    of_an_earlier_run.write_text("{}")
    process = start(text, "--steps", "1000000", command="compare")
    wait_for_steps(text, process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out = finish(process, 20)
    assert time.monotonic() - began < 10
    assert process.returncode == 130, out
    assert "stopped by SIGINT" in out and "Traceback" not in out
    assert not of_an_earlier_run.exists()
    summary = RunSummary.read(text.parent / "out")
    assert summary.interrupted and summary.steps == max(read_losses(text.parent / "out" / "metrics.jsonl"))


def test_an_error_in_a_rank_ends_the_job_with_its_message(text: Path) -> None:
    in_the_way = text.parent / "out" / "metrics.jsonl"
    in_the_way.mkdir(parents=True)
    out = finish(process := start(text))
    assert process.returncode == 1
    assert "rank 0 failed: IsADirectoryError: " in out.splitlines()[-1] and str(in_the_way) in out.splitlines()[-1]


def test_doctor_finds_working_collectives_from_any_folder(tmp_path: Path) -> None:
    other = tmp_path / "hyper_parallel" / "__init__.py"  # as in an old clone; not what is installed
    other.parent.mkdir()
    other.write_text("raise ImportError('the wrong sources')")
    installed = ["-P"] if sys.version_info >= (3, 11) else []
    done = subprocess.run(
        [sys.executable, *installed, "-m", "hyper_parallel", "doctor", "--nproc", "2"],
        env=environment(),
        cwd=tmp_path if installed else ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers" in done.stdout and done.stdout.endswith("all is well\n")
    assert done.stdout.count("right") == 5
    assert "the loss's kernels for CPUs: " in done.stdout
