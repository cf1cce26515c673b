"""Small jobs that write and read checkpoints: in workers of the harness, or as a command of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hyper_parallel.trainer.checkpoint_folder import list_steps
from hyper_parallel.trainer.command_line import parse_train_options
from hyper_parallel.trainer.job import run_worker
from hyper_parallel.trainer.summary import read_losses
from tests.harness import Raised, run_distributed

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--training.batch-size 4 --training.sequence-length 16 --training.log-interval 100 "
    "--model.hidden-size 32 --model.intermediate-size 64 --model.num-attention-heads 4 "
    "--model.num-key-value-heads 2 --optimizer.lr 1e-2 --optimizer.warmup-steps 2"
).split()
STEPS = 6
EVERY_2 = ["--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.keep-latest-k", "0"]


def write_text(folder: Path) -> Path:
    """Some text to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("options.py", "metrics.py"):
        (folder / name).write_text((ROOT / "hyper_parallel/trainer" / name).read_text())
    return folder


def losses_of(arguments: list[str]) -> dict[int, float]:
    """In a worker of the harness: all losses that the run's file has afterwards."""
    options = parse_train_options(arguments)
    run_worker(options)
    return read_losses(options.output / "metrics.jsonl")


def arguments_of(
    root: Path, output: str, *more: str, degrees: tuple[int, int] = (1, 2), platform: str = "torch"
) -> list[str]:
    """What the command is given; ``degrees`` are dp and tp."""
    dp, tp = map(str, degrees)
    return [
        *("--data", str(root / "text"), "--output", str(root / output), "--steps", str(STEPS), *TINY),
        *("--parallelism.data-parallel-degree", dp, "--parallelism.tensor-parallel-degree", tp),
        *("--backend", platform, *more),
    ]


def train(
    root: Path, output: str, *more: str, degrees: tuple[int, int] = (1, 2), platform: str = "torch"
) -> dict[int, float]:
    """Run a job in the harness; the losses that its file has afterwards."""
    arguments = arguments_of(root, output, *more, degrees=degrees, platform=platform)
    size = degrees[0] * degrees[1]
    losses: dict[int, float] = run_distributed(losses_of, arguments, platform=platform, world_size=size, timeout=60)[0]
    return losses


def failures(root: Path, output: str, *more: str) -> list[Raised]:
    """Run a job at tp 2 that fails on both ranks."""
    return run_distributed(losses_of, arguments_of(root, output, *more), expect_error=True, timeout=60)


def environment() -> dict[str, str]:
    """Of a command that is no rank of any job."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HYPER_PARALLEL_PLATFORM")
    kept = {k: v for k, v in os.environ.items() if k not in foreign}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(
    root: Path, output: str, *more: str, degrees: tuple[int, int] = (1, 2), platform: str = "torch"
) -> subprocess.Popen[str]:
    """Start a job as users do."""
    arguments = arguments_of(root, output, *more, degrees=degrees, platform=platform)
    return subprocess.Popen(
        [sys.executable, "-m", "hyper_parallel", "train", *arguments, "--nproc", str(degrees[0] * degrees[1])],
        env=environment(),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps_in(root: Path, output: str) -> list[int]:
    """Of the checkpoints of a run."""
    return list_steps(root / output / "checkpoints")


def steps_logged(root: Path, output: str) -> list[int]:
    """In the order of the file of metrics."""
    return [json.loads(line)["step"] for line in (root / output / "metrics.jsonl").read_text().splitlines()]
