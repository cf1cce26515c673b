"""The environment variables from which each backend's workers learn their place in a local job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LAUNCHER_VARIABLES", "ProcessPlan", "is_worker", "plan_processes", "without_launcher"]

_HOST = "127.0.0.1"

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun and this library's launcher set."""

_PREFIX = "TORCHELASTIC_"


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a job: its name in messages, its rank, and what to add to the environment."""

    name: str
    rank: int
    environment: Mapping[str, str]


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether somebody has started this process as one rank of a job."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is no rank of any job."""
    return {k: v for k, v in environment.items() if k not in LAUNCHER_VARIABLES and not k.startswith(_PREFIX)}


def plan_processes(backend: str, nproc: int, port: int) -> list[ProcessPlan]:
    """The processes of a local job.

    Args:
        backend: ``"torch"``.
        nproc: number of ranks.
        port: a free port on the loopback device, for the rendezvous.

    Raises:
        ValueError: another backend.
    """
    if backend != "torch":
        raise ValueError(f"local workers of the {backend!r} backend cannot be started; expected 'torch'")
    common = {
        "HYPER_PARALLEL_PLATFORM": backend,
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "PYTHONUNBUFFERED": "1",
        # Ranks share the cores of this machine; more threads than cores is slower, not faster.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }
    if sys.platform.startswith("linux"):
        common["GLOO_SOCKET_IFNAME"] = "lo"
    return [
        ProcessPlan(f"rank {rank}", rank, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(nproc)
    ]
