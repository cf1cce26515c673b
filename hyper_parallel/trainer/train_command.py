"""``hyper-parallel train``: one rank of a job, or the process that starts the ranks and sums up."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from hyper_parallel.trainer.command_line import UsageError, parse_train_options
from hyper_parallel.trainer.launch_environment import is_worker
from hyper_parallel.trainer.launcher import JobFailed, JobInterrupted, run_job
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import (
    COMPARISON_FILE,
    METRICS_FILE,
    SINGLE_PROCESS_FOLDER,
    SUMMARY_FILE,
    RunSummary,
    compare_losses,
    read_losses,
)
from hyper_parallel.trainer.text import find_files
from hyper_parallel.trainer.worker import ERROR_FILE, run_guarded

__all__ = ["run"]

_INTERRUPTED = 130
"""Exit status of a rank that stopped early because it was told to."""


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    try:
        options = parse_train_options(arguments)
        if is_worker(os.environ):
            return run_guarded(lambda: _work(options, arguments))
        _check(options)
        return _launch(options, arguments)
    except UsageError as error:
        print(f"hyper-parallel train: {error}", file=sys.stderr)
        return 2
    except JobFailed as failure:
        print(f"\n{failure.details}\nhyper-parallel train: {failure}", file=sys.stderr)
        return 1
    except JobInterrupted as stop:
        print(f"\nhyper-parallel train: {stop}; metrics so far are in {options.output}", file=sys.stderr)
        return 128 + stop.signal_number


def _check(options: TrainOptions) -> None:
    """What can be known to be wrong before any worker starts."""
    degrees = options.parallelism
    needed = degrees.data_parallel_degree * degrees.tensor_parallel_degree
    if needed != options.nproc:
        raise UsageError(
            f"data_parallel_degree ({degrees.data_parallel_degree}) * tensor_parallel_degree "
            f"({degrees.tensor_parallel_degree}) = {needed} must equal nproc ({options.nproc})"
        )
    try:
        find_files(options.data)
    except OSError as error:
        raise UsageError(str(error)) from None


def _work(options: TrainOptions, arguments: Sequence[str]) -> int:
    """What a rank does."""
    # These load the framework, which the process that starts the ranks does not need.
    from hyper_parallel.platform import get_platform

    get_platform(options.backend)  # settles which one, before anything else asks
    from hyper_parallel.platform.training import load_training_tools
    from hyper_parallel.trainer.job import run_worker

    sums_up = ERROR_FILE not in os.environ and os.environ["RANK"] == "0"  # nobody else could
    if sums_up:
        _discard_comparison(options)
    summary = run_worker(options)
    load_training_tools().close()
    if summary.interrupted:
        return _INTERRUPTED
    if sums_up:
        _report(options, summary, arguments)
    return 0


def _launch(options: TrainOptions, arguments: Sequence[str]) -> int:
    """What the process that starts the ranks does."""
    _discard_comparison(options)
    _run_workers(options, arguments)
    _report(options, RunSummary.read(options.output), arguments)
    return 0


def _discard_comparison(options: TrainOptions) -> None:
    """An earlier run's comparison is none of this run, which may be stopped before it makes its own."""
    single = options.output / SINGLE_PROCESS_FOLDER
    for file in (options.output / COMPARISON_FILE, single / METRICS_FILE, single / SUMMARY_FILE):
        file.unlink(missing_ok=True)


def _report(options: TrainOptions, summary: RunSummary, arguments: Sequence[str]) -> None:
    """Sum up; with ``compare``, also train with one process and say how far apart the losses are."""
    print(f"\n{summary.describe()}", flush=True)
    written = [options.output / METRICS_FILE, options.output / SUMMARY_FILE]
    if options.compare and summary.processes > 1:
        print("\nthe same with one process:", flush=True)
        single = replace(
            options,
            nproc=1,
            output=options.output / SINGLE_PROCESS_FOLDER,
            parallelism=replace(options.parallelism, data_parallel_degree=1, tensor_parallel_degree=1),
        )
        overrides = ["--nproc", "1", "--output", str(single.output), "--no-compare"]
        overrides += ["--parallelism.data-parallel-degree", "1", "--parallelism.tensor-parallel-degree", "1"]
        _run_workers(single, [*arguments, *overrides])
        print(f"\n{RunSummary.read(single.output).describe()}")
        comparison = compare_losses(
            read_losses(options.output / METRICS_FILE), read_losses(single.output / METRICS_FILE)
        )
        path = options.output / COMPARISON_FILE
        path.write_text(json.dumps(asdict(comparison), indent=2) + "\n", encoding="utf-8")
        written += [path, single.output / METRICS_FILE]
        print(f"\n{comparison.describe()}")
    print("written: " + ", ".join(map(str, written)), flush=True)


def _run_workers(options: TrainOptions, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "hyper_parallel", "train", *arguments]
    run_job(command, nproc=options.nproc, backend=options.backend, log_folder=options.output / "logs")
