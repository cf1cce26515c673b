"""What a person watches, and what is kept of each step."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import TrainingTools
from hyper_parallel.trainer.output_folder import mark_output
from hyper_parallel.trainer.summary import encode_json
from hyper_parallel.trainer.tensorboard_log import TensorBoardLog
from hyper_parallel.trainer.validation import Validation

__all__ = ["MetricsLog", "StepRecord"]


@dataclass(frozen=True)
class StepRecord:
    """One step, as the loop sees it; loss and norm stay on the device until they are reported.

    Attributes:
        step: the first is 1.
        loss: mean over the valid tokens of all ranks.
        grad_norm: before clipping.
        lr: learning rate used.
        tokens: of all ranks.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: int


class MetricsLog:
    """A progress bar, a line per interval and, in a file, a JSON line per step; rank 0 writes them.

    The line shows the mean loss of its interval, and the norm and rate of the last step.

    Every rank records every step: closing an interval is collective (the largest peak memory is found).

    Args:
        path: the JSON lines file; replaced, except for the first ``keep`` steps.
        total: steps of the run.
        interval: steps between two lines.
        mesh: the job's.
        tools: the backend's.
        label: what the progress bar says.
        start: steps that were taken before.
        keep: how many of them the files may have from an earlier part of this run; None: all. 0 where the run goes on
            from a checkpoint in another folder: what is in the files then is of a run of its own.
        tensorboard: a folder for TensorBoard's events; None: none are written.
    """

    def __init__(
        self,
        path: Path,
        total: int,
        interval: int,
        mesh: DeviceMesh,
        tools: TrainingTools,
        label: str,
        start: int = 0,
        keep: int | None = None,
        tensorboard: Path | None = None,
    ) -> None:
        self._interval, self._mesh, self._tools = interval, mesh, tools
        self._pending: list[StepRecord] = []
        self._began = self._since = time.perf_counter()
        self._tokens = 0
        self.peak_memory = 0
        keep = start if keep is None else keep
        kept = _rows_until(path, keep)
        steps = [row for row in kept if "loss" in row]  # others are of validations
        self.first: dict[str, Any] = steps[0] if steps else {}
        self.last: dict[str, Any] = steps[-1] if steps else {}
        self.validation: dict[str, Any] = {}
        self._file: IO[str] | None = None
        self._bar: Any = None
        self._events: TensorBoardLog | None = None
        if get_platform().rank() == 0:
            mark_output(path.parent)
            draft = path.with_name(f".{path.name}.part")
            draft.write_text("".join(encode_json(row) + "\n" for row in kept), encoding="utf-8")
            draft.replace(path)  # at once: a job that is killed here has not lost its history
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
            if tensorboard is not None:
                self._events = TensorBoardLog(tensorboard, keep)
            # disable=None: no bar where nobody would see it move
            self._bar = tqdm(total=total, initial=start, desc=label, unit="step", disable=None, dynamic_ncols=True)

    def record(self, step: StepRecord) -> None:
        """Take note of a step; every ``interval`` steps, report."""
        self._pending.append(step)
        self._tokens += step.tokens
        if self._bar is not None:
            self._bar.update()
        if step.step % self._interval == 0:
            self.flush()

    def flush(self) -> None:
        """Report what was not reported yet. Collective."""
        if not self._pending:
            return
        platform = get_platform()
        rows = [
            {
                "step": r.step,
                "loss": float(platform.to_numpy(r.loss)),
                "grad_norm": float(platform.to_numpy(r.grad_norm)),
                "lr": r.lr,
                "tokens": r.tokens,
            }
            for r in self._pending
        ]
        now = time.perf_counter()
        speed = sum(r.tokens for r in self._pending) / max(now - self._since, 1e-9)
        self.peak_memory = self._largest(self._tools.peak_memory(self._mesh.device_type))
        for row in rows:
            row |= {"tokens_per_second": round(speed, 1), "peak_memory_bytes": self.peak_memory}
        self._write(rows)
        self.first, self.last = self.first or rows[0], rows[-1]
        self._pending.clear()
        self._since = time.perf_counter()

    def validated(self, step: int, found: Validation, seconds: float) -> None:
        """Take note of a validation after ``step``, whose row says ``validation_loss``; its time does not count."""
        self._since += seconds
        self._began += seconds
        row = {"step": step, "validation_loss": found.loss, "validation_tokens": found.tokens}
        self.validation = row
        if self._file is None:
            return
        self._keep([row])
        line = f"step {step:>5}  validation loss {found.loss:.4f}  perplexity {found.perplexity:.2f}"
        tqdm.write(f"{line}  {found.tokens:,} tokens", file=sys.stdout)
        sys.stdout.flush()

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run so far."""
        return self._tokens / max(self._since - self._began, 1e-9)

    @property
    def seconds(self) -> float:
        """From the first step to the last report."""
        return self._since - self._began

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._file is None:
            return
        self._keep(rows)
        last = rows[-1]
        mean = sum(row["loss"] for row in rows) / len(rows)
        line = (
            f"step {last['step']:>5}  loss {mean:.4f}  grad norm {last['grad_norm']:.3f}  "
            f"lr {last['lr']:.2e}  {last['tokens_per_second']:,.0f} tokens/s  "
            f"peak memory {last['peak_memory_bytes'] / 2**20:,.0f} MiB a rank"
        )
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
        self._bar.set_postfix(loss=f"{mean:.3f}", refresh=False)

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        """In the files, where there are any."""
        if self._file is None:
            return
        for row in rows:
            self._file.write(encode_json(row) + "\n")
            if self._events is not None:
                self._events.write(row)
        self._file.flush()
        if self._events is not None:
            self._events.flush()

    def _largest(self, value: int) -> int:
        """The largest of all ranks' values."""
        if self._mesh.size() == 1:
            return value
        platform = get_platform()
        tensor = self._tools.to_device(np.array([value], np.float32), self._mesh.device_type)
        for dim in range(self._mesh.ndim):
            tensor = platform.all_reduce(tensor, "max", self._mesh.get_group(dim))
        return int(platform.to_numpy(tensor)[0])

    def close(self) -> None:
        """Close files and progress bar."""
        if self._file is not None:
            self._file.close()
            self._bar.close()
        if self._events is not None:
            self._events.close()


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """What an earlier part of the run has written of its steps up to ``step``; a line cut short ends it."""
    rows: list[dict[str, Any]] = []
    if step == 0 or not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] <= step:
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows
