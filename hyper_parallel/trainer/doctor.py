"""``hyper-parallel doctor``: what is installed here, and whether local workers can talk to each other."""

from __future__ import annotations

import importlib.metadata
import os
import platform as host
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

import hyper_parallel
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform import Group, Platform, default_backend, get_platform
from hyper_parallel.platform.native.rows import describe
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.trainer.launch_environment import is_scheduler, is_worker, rank_command
from hyper_parallel.trainer.launcher import JobFailed, JobInterrupted, run_job
from hyper_parallel.trainer.worker import run_guarded

__all__ = ["DoctorOptions", "run"]

_PACKAGES = (
    *("numpy", "torch", "mindspore", "PyYAML", "tyro", "tqdm", "safetensors"),
    *("tokenizers", "tensorboard", "matplotlib"),
)

Check = Callable[[Platform, Group], tuple[np.ndarray, np.ndarray]]
"""What came back from a collective, and what should have."""


@dataclass(frozen=True)
class DoctorOptions:
    """Say what is installed, and let local workers try every collective on the CPU."""

    nproc: int = 2
    """Workers to start."""

    backend: Literal["torch", "mindspore"] = field(default_factory=default_backend)
    """The framework; by default the one that is installed, of both PyTorch."""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"nproc must be at least 1, found {self.nproc}")


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 0 when all is well."""
    options = tyro.cli(DoctorOptions, args=list(arguments), prog="hyper-parallel doctor")
    if is_worker(os.environ):
        return run_guarded(lambda: _examine(options))
    _describe_host()
    command = rank_command("doctor", arguments)
    with tempfile.TemporaryDirectory() as logs:
        try:
            run_job(command, nproc=options.nproc, backend=options.backend, log_folder=Path(logs))
        except JobFailed as failure:
            print(f"\n{failure.details}\nhyper-parallel doctor: {failure}", file=sys.stderr)
            return 1
        except JobInterrupted as stop:
            return 128 + stop.signal_number
    print("all is well")
    return 0


def _describe_host() -> None:
    print(f"hyper_parallel {hyper_parallel.__version__}")
    print(f"Python {host.python_version()} on {host.system()} {host.machine()}, {os.cpu_count()} CPU cores")
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"  {name:<16}{version}")
    print(f"the loss's kernels for CPUs: {describe()}")
    sys.stdout.flush()


def _examine(options: DoctorOptions) -> int:
    """What a worker does; a wrong result on one rank is an error on that rank."""
    platform = get_platform(options.backend)
    platform.ensure_initialized("cpu")  # a scheduler serves the ranks here, until they have ended
    if is_scheduler(os.environ):
        return 0
    size = platform.world_size()
    group = platform.create_group([tuple(range(size))])
    if group.rank == 0:
        print(f"backend {platform.name} {platform.version}, {size} workers on the CPU")
    for name, check in _CHECKS.items():
        found, expected = check(platform, group)
        if found.shape != expected.shape or not (found == expected).all():
            raise RuntimeError(f"{name} gave {found.tolist()}; expected {expected.tolist()}")
        if group.rank == 0:
            print(f"  {name:<24}right", flush=True)
    load_training_tools().close()
    return 0


def _own(rank: int, size: int) -> np.ndarray:
    """Whole numbers that tell ranks and elements apart, and that sum without rounding."""
    return (np.arange(size, dtype=np.float32) + 100 * rank).reshape(-1, 1)


def _all_reduce(platform: Platform, group: Group) -> tuple[np.ndarray, np.ndarray]:
    found = platform.all_reduce(platform.from_numpy(_own(group.rank, 3)), "sum", group)
    return platform.to_numpy(found), sum((_own(r, 3) for r in range(group.size)), np.zeros((3, 1), np.float32))


def _all_reduce_max(platform: Platform, group: Group) -> tuple[np.ndarray, np.ndarray]:
    found = platform.all_reduce(platform.from_numpy(_own(group.rank, 3)), "max", group)
    return platform.to_numpy(found), _own(group.size - 1, 3)


def _all_gather_uneven(platform: Platform, group: Group) -> tuple[np.ndarray, np.ndarray]:
    sizes = _uneven(group)
    found = platform.all_gather_uneven(platform.from_numpy(_own(group.rank, sizes[group.rank])), 0, sizes, group)
    return platform.to_numpy(found), np.concatenate([_own(r, n) for r, n in enumerate(sizes)])


def _reduce_scatter_uneven(platform: Platform, group: Group) -> tuple[np.ndarray, np.ndarray]:
    sizes = _uneven(group)
    total = sum(sizes)
    found = platform.reduce_scatter_uneven(platform.from_numpy(_own(group.rank, total)), 0, sizes, group)
    summed = sum((_own(r, total) for r in range(group.size)), np.zeros((total, 1), np.float32))
    start = sum(sizes[: group.rank])
    return platform.to_numpy(found), summed[start : start + sizes[group.rank]]


def _broadcast(platform: Platform, group: Group) -> tuple[np.ndarray, np.ndarray]:
    last = group.size - 1
    found = platform.broadcast(platform.from_numpy(_own(group.rank, 3)), last, group)
    return platform.to_numpy(found), _own(last, 3)


def _uneven(group: Group) -> list[int]:
    """Shards of which the last one is shorter."""
    return [stop - start for start, stop in chunk_ranges(2 * group.size + 1, group.size)]


_CHECKS: dict[str, Check] = {
    "all_reduce sum": _all_reduce,
    "all_reduce max": _all_reduce_max,
    "all_gather_uneven": _all_gather_uneven,
    "reduce_scatter_uneven": _reduce_scatter_uneven,
    "broadcast": _broadcast,
}
