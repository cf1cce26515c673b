"""What a run leaves in its folder: losses of each step, a summary, and the comparison of two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "COMPARISON_FILE",
    "METRICS_FILE",
    "PICTURE_FILE",
    "SINGLE_PROCESS_FOLDER",
    "SUMMARY_FILE",
    "TENSORBOARD_FOLDER",
    "Comparison",
    "RunSummary",
    "compare_runs",
    "encode_json",
    "read_column",
    "read_losses",
]

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
COMPARISON_FILE = "comparison.json"
PICTURE_FILE = "loss.png"
TENSORBOARD_FOLDER = "tensorboard"
SINGLE_PROCESS_FOLDER = "single_process"


def encode_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """Names and plain values as JSON, which has no number that is not finite: null stands for those.

    Example:
        >>> encode_json({"step": 3, "loss": float("nan")})
        '{"step": 3, "loss": null}'
    """
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
    return json.dumps(finite, indent=indent, allow_nan=False)


@dataclass(frozen=True)
class RunSummary:
    """What is left to say when a run has ended."""

    steps: int
    interrupted: bool
    first_loss: float
    last_loss: float
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    parameters: int
    backend: str
    version: str
    data_parallel_degree: int
    tensor_parallel_degree: int
    validation_loss: float | None = None
    """The last one; None without validation."""

    start: int = 0
    """Steps that were taken before this part of the run, which time and speed are of."""

    found_complete: bool = False
    """Whether the job had nothing left to do, and this is what it had written before."""

    @property
    def processes(self) -> int:
        """Ranks of the job."""
        return self.data_parallel_degree * self.tensor_parallel_degree

    @property
    def arrangement(self) -> str:
        """The degrees."""
        return f"dp={self.data_parallel_degree} tp={self.tensor_parallel_degree}"

    def describe(self) -> str:
        """One or two lines."""
        taken = f"{self.steps - self.start} steps"
        did = f"steps {self.start} -> {self.steps}, {taken}" if self.start else taken
        ended = f"stopped after {did}" if self.interrupted else did
        return (
            f"{self.arrangement} on {self.backend} {self.version}, {self.parameters:,} parameters: "
            f"{ended} in {self.seconds:.1f} s, "
            f"loss {self.first_loss:.4f} in the first step, {self.last_loss:.4f} in the last, "
            f"{self.tokens_per_second:,.0f} tokens/s, "
            f"peak memory {self.peak_memory_bytes / 2**20:,.0f} MiB a rank"
        )

    def write(self, folder: Path) -> None:
        """Into the folder of a run."""
        facts = asdict(self)
        del facts["found_complete"]  # of the call, not of the run
        (folder / SUMMARY_FILE).write_text(encode_json(facts, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        """From the folder of a run."""
        facts: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        for name in ("first_loss", "last_loss"):
            if facts[name] is None:
                facts[name] = math.nan
        return cls(**facts)


def read_column(path: Path, name: str) -> dict[int, float]:
    """Step -> value of one field, from a JSON lines file of metrics; rows without it are left out, null is nan."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return {row["step"]: math.nan if row[name] is None else row[name] for row in rows if name in row}


def read_losses(path: Path) -> dict[int, float]:
    """Step -> loss of a JSON lines file of metrics."""
    return read_column(path, "loss")


@dataclass(frozen=True)
class Comparison:
    """Two runs, step by step.

    Attributes:
        steps: how many were compared.
        max_difference: largest absolute difference of the losses.
        step: where it is.
        max_grad_norm_difference: largest absolute difference of the gradients' norms, before clipping.
        grad_norm_step: where it is.
    """

    steps: int
    max_difference: float
    step: int
    max_grad_norm_difference: float
    grad_norm_step: int

    def describe(self) -> str:
        """Two lines."""
        return (
            f"maximum loss difference in {self.steps} steps: {self.max_difference:.2e} (step {self.step})\n"
            f"maximum gradient norm difference: {self.max_grad_norm_difference:.2e} (step {self.grad_norm_step})"
        )


def compare_runs(one: Path, other: Path) -> Comparison:
    """Compare two JSON lines files of metrics.

    Raises:
        ValueError: they have different steps, or none.
    """
    step, loss = _largest_gap(read_losses(one), read_losses(other))
    norm_step, norm = _largest_gap(read_column(one, "grad_norm"), read_column(other, "grad_norm"))
    return Comparison(len(read_losses(one)), loss, step, norm, norm_step)


def _largest_gap(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[int, float]:
    """The step of the largest difference, and the difference."""
    if one.keys() != other.keys() or not one:
        raise ValueError(f"the runs have different steps: {len(one)} and {len(other)}; nothing to compare")
    # A number that is none is as far off as can be.
    gaps = {step: abs(one[step] - other[step]) for step in one}
    worst = max(gaps, key=lambda step: (gaps[step] != gaps[step], gaps[step]))
    return worst, gaps[worst]
