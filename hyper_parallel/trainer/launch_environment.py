"""The environment variables from which each backend's workers learn their place in a local job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import hyper_parallel

__all__ = [
    "LAUNCHER_VARIABLES",
    "ProcessPlan",
    "is_scheduler",
    "is_worker",
    "plan_processes",
    "rank_command",
    "without_launcher",
]

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
    "RANK_ID",
    "RANK_SIZE",
    "DEVICE_ID",
    "MS_ROLE",
    "MS_NODE_ID",
    "MS_WORKER_NUM",
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
    "MS_TOPO_TIMEOUT",
)
"""What torchrun, msrun and this library's launcher set."""

_PREFIX = "TORCHELASTIC_"


def rank_command(name: str, arguments: Sequence[str]) -> list[str]:
    """The line that starts a rank of the command ``name``. Sources that happen to lie in the current folder are not
    taken where this process runs others (Python 3.10 has no option for that).
    """
    root = os.path.dirname(os.path.abspath(hyper_parallel.__file__))  # perhaps a link in the current folder
    elsewhere = sys.version_info >= (3, 11) and os.path.realpath(os.path.dirname(root)) != os.path.realpath(".")
    return [sys.executable, *(["-P"] if elsewhere else []), "-m", "hyper_parallel", name, *arguments]


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a job.

    Attributes:
        name: in messages.
        rank: its rank; None for a process that serves the ranks, and ends when they have.
        environment: what to add to it.
    """

    name: str
    rank: int | None
    environment: Mapping[str, str]


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether somebody has started this process as a part of a job."""
    return ("RANK" in environment and "WORLD_SIZE" in environment) or "MS_ROLE" in environment


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Whether this process is no rank, but the one that MindSpore's ranks meet at. It runs the same command."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is no rank of any job."""
    return {k: v for k, v in environment.items() if k not in LAUNCHER_VARIABLES and not k.startswith(_PREFIX)}


def plan_processes(backend: str, nproc: int, port: int) -> list[ProcessPlan]:
    """The processes of a local job.

    Args:
        backend: ``"torch"`` or ``"mindspore"``.
        nproc: number of ranks.
        port: a free port on the loopback device, for the rendezvous.

    Raises:
        ValueError: another backend.
    """
    plans = {"torch": _plan_torch, "mindspore": _plan_mindspore}
    if backend not in plans:
        raise ValueError(f"unknown backend {backend!r}; expected one of {tuple(plans)}")
    common = {
        "HYPER_PARALLEL_PLATFORM": backend,
        "PYTHONUNBUFFERED": "1",
        # Ranks share the cores of this machine; more threads than cores is slower, not faster.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    ranks = {
        rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc),
               "LOCAL_WORLD_SIZE": str(nproc)}
        for rank in range(nproc)
    }  # fmt: skip
    return plans[backend](ranks, common, port)


def _plan_torch(ranks: Mapping[int, Mapping[str, str]], common: Mapping[str, str], port: int) -> list[ProcessPlan]:
    meeting = {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
    if sys.platform.startswith("linux"):
        meeting["GLOO_SOCKET_IFNAME"] = "lo"
    return [ProcessPlan(f"rank {rank}", rank, {**own, **meeting}) for rank, own in ranks.items()]


def _plan_mindspore(ranks: Mapping[int, Mapping[str, str]], common: Mapping[str, str], port: int) -> list[ProcessPlan]:
    """One rank needs nobody to meet; more of them meet at a scheduler."""
    shared = {
        "GLOG_v": os.environ.get("GLOG_v", "3"),  # errors; at the usual level it warns of what is as it should be
        # Ranks look for the scheduler every second, not every few.
        "MS_RETRY_INTERVAL_LOWER": "1",
        "MS_RETRY_INTERVAL_UPPER": "1",
    }
    if len(ranks) == 1:
        return [ProcessPlan("rank 0", 0, {**ranks[0], **shared})]
    size = str(len(ranks))
    shared |= {"MS_WORKER_NUM": size, "MS_SCHED_HOST": _HOST, "MS_SCHED_PORT": str(port), "RANK_SIZE": size}
    scheduler = ProcessPlan("the scheduler", None, {**common, **shared, "MS_ROLE": "MS_SCHED"})
    own = {r: {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(r), "RANK_ID": str(r), "DEVICE_ID": str(r)} for r in ranks}
    return [scheduler, *(ProcessPlan(f"rank {r}", r, {**ranks[r], **shared, **own[r]}) for r in ranks)]
