"""Small training jobs in the harness's workers, and what they find."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.trainer.command_line import parse_train_options
from hyper_parallel.trainer.job import run_worker
from hyper_parallel.trainer.summary import read_column
from tests.harness import run_distributed

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--training.batch-size 4 --training.sequence-length 32 --training.log-interval 5 "
    "--model.hidden-size 32 --model.intermediate-size 64 --model.num-attention-heads 2 "
    "--model.num-key-value-heads 1 --optimizer.lr 1e-2 --optimizer.warmup-steps 2 "
    "--training.max-grad-norm 0.5 --metrics.no-picture"
).split()
STEPS = 4


def write_text(folder: Path) -> Path:
    """A few files of Python."""
    path = folder / "text"
    path.mkdir()
    for name in ("options.py", "trainer.py"):
        (path / name).write_text((ROOT / "hyper_parallel/trainer" / name).read_text())
    return path


def columns_of(arguments: list[str]) -> dict[str, dict[int, float]]:
    """In a worker of the harness: losses and norms by step."""
    options = parse_train_options(arguments)
    run_worker(options)
    path = options.output / "metrics.jsonl"
    return {name: read_column(path, name) for name in ("loss", "grad_norm", "validation_loss", "validation_tokens")}


def train(
    text: Path, dp: int, tp: int, *arguments: str, platform: str = "torch", timeout: float = 60
) -> dict[str, dict[int, float]]:
    """Train on dp x tp ranks; what rank 0 has recorded."""
    options = ["--data", str(text), "--output", str(text.parent / "out"), "--steps", str(STEPS), *TINY]
    options += ["--backend", platform, "--nproc", str(dp * tp)]
    options += ["--parallelism.data-parallel-degree", str(dp), "--parallelism.tensor-parallel-degree", str(tp)]
    found: dict[str, dict[int, float]] = run_distributed(
        columns_of, [*options, *arguments], platform=platform, world_size=dp * tp, timeout=timeout
    )[0]
    return found
