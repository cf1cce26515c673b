"""``hyper-parallel train``: one rank of a job, or the process that starts the ranks and sums up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from hyper_parallel.trainer.checkpoint_folder import list_steps
from hyper_parallel.trainer.checkpoint_start import check_start, checkpoints_of, find_start
from hyper_parallel.trainer.combinations import check_model
from hyper_parallel.trainer.command_line import UsageError, parse_train_options
from hyper_parallel.trainer.completed import completed_run, describe_completed
from hyper_parallel.trainer.devices import check_devices
from hyper_parallel.trainer.launch_environment import is_scheduler, is_worker, rank_command
from hyper_parallel.trainer.launcher import INTERRUPTED, STOP_SECONDS, JobFailed, JobInterrupted, run_job
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.output_folder import check_output, mark_output
from hyper_parallel.trainer.processes import check_processes
from hyper_parallel.trainer.report import describe_run, missing_packages
from hyper_parallel.trainer.summary import METRICS_FILE, RunSummary
from hyper_parallel.trainer.validation_text import open_texts
from hyper_parallel.trainer.worker import ERROR_FILE, run_guarded

__all__ = ["check", "launch", "run", "run_reporting", "train_as_rank"]

_SAVE_SECONDS = 3600.0
"""Time that workers get after Ctrl-C to write a checkpoint; a second Ctrl-C ends the wait."""


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    return run_reporting("train", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    options = parse_train_options(arguments)
    if is_worker(os.environ):
        return run_guarded(lambda: train_as_rank(options, _report))
    if _is_complete(options):
        print(describe_completed(options), flush=True)
        return 0
    check(options)
    launch("train", options, arguments)
    _report(options, RunSummary.read(options.output))
    return 0


def _is_complete(options: TrainOptions) -> bool:
    try:
        return completed_run(options) is not None
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def _report(options: TrainOptions, summary: RunSummary) -> None:
    if summary.found_complete:
        return  # said so itself
    print(f"\n{describe_run(options, summary)}", flush=True)


def run_reporting(name: str, action: Callable[[], int]) -> int:
    """``action()``, with what may end it in one line instead of a traceback.

    Returns:
        Its exit status; 1 when a worker failed, 2 for wrong usage, 128 + the signal's number after a signal.
    """
    try:
        return action()
    except UsageError as error:
        print(f"hyper-parallel {name}: {error}", file=sys.stderr)
        return 2
    except JobFailed as failure:
        print(f"\n{failure.details}\nhyper-parallel {name}: {failure}", file=sys.stderr)
        return 1
    except JobInterrupted as stop:
        print(f"\nhyper-parallel {name}: {stop}", file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:  # before there were workers to tell
        print(f"\nhyper-parallel {name}: stopped by SIGINT", file=sys.stderr)
        return INTERRUPTED


def check(options: TrainOptions) -> None:
    """What can be known to be wrong before any worker starts; workers find the token ids ready afterwards.

    Raises:
        UsageError: degrees, processes and devices, the model, the text, the output folder, the checkpoint to go on
            from, or the installed packages do not fit.
    """
    check_processes(options.parallelism, options.nproc)
    if missing := missing_packages(options):
        raise UsageError(missing)
    check_devices(options.backend, options.device, options.nproc)
    try:
        check_output(options.output)
        check_model(options)
        start = find_start(options)  # before the text is read
        check_start(options, start, open_texts(options)[0])
        mark_output(options.output)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def train_as_rank(options: TrainOptions, report: Callable[[TrainOptions, RunSummary], object]) -> int:
    """What a rank does; returns its exit status. ``report`` is called where nobody else could sum up."""
    # These load the framework, which the process that starts the ranks does not need.
    from hyper_parallel.platform import get_platform

    platform = get_platform(options.backend)  # settles which one, before anything else asks
    if is_scheduler(os.environ):
        platform.ensure_initialized(options.device)  # serves the ranks, and returns when they have ended
        return 0
    from hyper_parallel.platform.training import load_training_tools
    from hyper_parallel.trainer.job import run_worker

    summary = run_worker(options)
    first = platform.rank() == 0
    load_training_tools().close()
    if summary.interrupted:
        return INTERRUPTED
    if first and ERROR_FILE not in os.environ:
        report(options, summary)
    return 0


def launch(name: str, options: TrainOptions, arguments: Sequence[str]) -> None:
    """Run the command ``name`` as every rank of a local job.

    Raises:
        JobFailed: a rank failed.
        JobInterrupted: the job was stopped by a signal.
    """
    command = rank_command(name, arguments)
    print(f"starting {options.nproc} processes of {options.backend}", flush=True)
    saves = options.checkpoint.enable and options.checkpoint.save_on_stop
    try:
        run_job(
            command,
            nproc=options.nproc,
            backend=options.backend,
            log_folder=options.output / "logs",
            stop_seconds=_SAVE_SECONDS if saves else STOP_SECONDS,
        )
    except JobInterrupted:
        print(f"\n{_what_is_left(options)}", file=sys.stderr)
        raise


def _what_is_left(options: TrainOptions) -> str:
    """Of a job that was stopped."""
    if not (options.output / METRICS_FILE).exists():
        return f"no step has been written into {options.output}"
    found = f"what there is so far is in {options.output}"
    same = options.checkpoint.enable and options.checkpoint.resume == "auto"
    steps = list_steps(checkpoints_of(options)) if same else []
    return f"{found}; the same command goes on after step {steps[-1]}" if steps else found
