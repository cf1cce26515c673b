"""``hyper-parallel compare``: train a job, train it again in one process, and say how far apart the two are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hyper_parallel.trainer.command_line import UsageError, parse_options
from hyper_parallel.trainer.data_open import token_cache
from hyper_parallel.trainer.launch_environment import is_worker
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.report import draw_picture, where_written
from hyper_parallel.trainer.summary import (
    COMPARISON_FILE,
    METRICS_FILE,
    SINGLE_PROCESS_FOLDER,
    SUMMARY_FILE,
    RunSummary,
    compare_runs,
    encode_json,
)
from hyper_parallel.trainer.train_command import check, launch, run_reporting, train_as_rank
from hyper_parallel.trainer.worker import run_guarded

__all__ = ["CompareOptions", "run"]


@dataclass(frozen=True)
class CompareOptions(TrainOptions):
    """Train as the command ``train`` does, then the same with one process; report the largest differences between the
    losses, and between the norms of the gradients, of the same step."""

    output: Path = Path("outputs/compare_{backend}")
    """Where metrics and logs of both runs are written; those of an earlier comparison are replaced. ``{backend}``
    stands for the name of the framework."""

    tolerance: float | None = None
    """Fail with exit status 1 when a loss differs by more than this; None: only report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, found {self.tolerance}")


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    return run_reporting("compare", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    options = parse_options(CompareOptions, "compare", arguments)
    if is_worker(os.environ):
        if os.environ.get("RANK") == "0" and options.output.name != SINGLE_PROCESS_FOLDER:
            _discard(options)
        return run_guarded(lambda: train_as_rank(options, lambda *_: _train_alone(options, arguments)))
    check(options)
    degrees = options.parallelism
    if degrees.data_parallel_degree * degrees.tensor_parallel_degree == 1:
        raise UsageError("there is one process, and nothing to compare it with; see --parallelism and --nproc")
    if options.checkpoint.enable:
        raise UsageError("both runs start anew; leave out checkpoint.enable")
    launch("compare", options, arguments)
    return _train_alone(options, arguments)


def _discard(options: CompareOptions) -> None:
    """An earlier comparison is none of these runs, which may be stopped before they make their own. Rank 0 does it."""
    alone = options.output / SINGLE_PROCESS_FOLDER
    for file in (options.output / COMPARISON_FILE, alone / METRICS_FILE, alone / SUMMARY_FILE):
        file.unlink(missing_ok=True)


def _train_alone(options: CompareOptions, arguments: Sequence[str]) -> int:
    """The second run, and what comes of both."""
    summary = RunSummary.read(options.output)
    print(f"\n{summary.describe()}\n\nthe same with one process:", flush=True)
    folder = options.output / SINGLE_PROCESS_FOLDER
    launch("compare", replace(options, nproc=1, output=folder), [*arguments, *_alone(options, folder)])
    single = RunSummary.read(folder)
    print(f"\n{single.describe()}")

    metrics = {"one process": folder / METRICS_FILE, summary.arrangement: options.output / METRICS_FILE}
    comparison = compare_runs(*metrics.values())
    path = options.output / COMPARISON_FILE
    path.write_text(encode_json(asdict(comparison), indent=2) + "\n", encoding="utf-8")
    note = draw_picture(options, metrics)
    print("\n".join([f"\n{comparison.describe()}", *note, where_written(options, path, folder)]), flush=True)
    if options.tolerance is not None and not comparison.max_difference <= options.tolerance:
        print(f"hyper-parallel compare: the losses differ by more than {options.tolerance}", file=sys.stderr)
        return 1
    return 0


def _alone(options: CompareOptions, folder: Path) -> list[str]:
    """Options that go before those given: one process, and none of what several need."""
    return [
        *("--nproc", "1"),
        *("--output", str(folder)),
        *("--text.cache", str(token_cache(options))),
        *("--parallelism.data-parallel-degree", "1"),
        *("--parallelism.tensor-parallel-degree", "1"),
        *("--parallelism.data-parallel", "replicate"),
        "--parallelism.no-enable-sequence-parallel",
    ]
