"""Start and end the processes of one group."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.harness.logs import Log

_ROOT = Path(__file__).resolve().parents[2]
_HOST = "127.0.0.1"
# Settings of a launcher that the test run itself may have been started by.
_FOREIGN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "RANK_ID",
    "RANK_SIZE",
    "DEVICE_ID",
)


@dataclass
class Process:
    """A process of the group: a rank, or MindSpore's scheduler (which has no connection)."""

    popen: subprocess.Popen[bytes]
    log: Log
    socket: Connection | None = None

    @property
    def connection(self) -> Connection:
        """The way to talk to a rank."""
        if self.socket is None:
            raise RuntimeError("this process is not a rank, it has no connection")
        return self.socket

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.popen.poll() is None

    def how_it_ended(self) -> str:
        """In words. A process that closed its socket a moment ago gets the moment to end."""
        try:
            code = self.popen.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def kill_all(processes: list[Process]) -> None:
    """End the processes and what they started."""
    for process in processes:
        if process.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)
    for process in processes:
        process.popen.wait()
        if process.socket is not None:
            process.socket.close()


def start_ranks(platform: str, world_size: int, directory: Path) -> tuple[list[Process], list[Process]]:
    """Start the processes of a group; the ranks, and those that serve them."""
    started: list[Process] = []
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        env = _environment(platform, world_size, listener.getsockname()[1])
        if platform == "torch":
            listener.listen()  # rank 0 inherits the socket
        else:
            listener.close()  # MindSpore's scheduler binds the port itself
        try:
            if platform == "mindspore":
                started.append(_start_scheduler(env, directory))
            for rank in range(world_size):
                inherited = [listener.fileno()] if platform == "torch" and rank == 0 else []
                started.append(
                    _start_rank(env | _rank_environment(platform, rank), rank, inherited, directory)
                )
        except BaseException:
            kill_all(started)
            raise
    return started[-world_size:], started[:-world_size]


def _start_rank(env: dict[str, str], rank: int, inherited: list[int], directory: Path) -> Process:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        if inherited:
            env["HARNESS_LISTENER"] = str(inherited[0])
        try:
            process = _start(
                ["-m", "tests.harness.worker", str(fd)], env, [*inherited, fd], directory, f"rank{rank}"
            )
        except BaseException:
            ours.close()
            raise
    process.socket = Connection(ours.detach())
    return process


def _start_scheduler(env: dict[str, str], directory: Path) -> Process:
    return _start(
        ["-m", "tests.harness.scheduler"], env | {"MS_ROLE": "MS_SCHED"}, [], directory, "scheduler"
    )


def _start(
    arguments: list[str], env: dict[str, str], inherited: list[int], directory: Path, name: str
) -> Process:
    path = directory / f"{name}.log"
    with open(path, "wb") as output:
        popen = subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,  # MindSpore writes files where it runs
            start_new_session=True,  # a process group, to end it with its children; and no Ctrl-C of ours
        )
    return Process(popen, Log(path))


def _environment(platform: str, world_size: int, port: int) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _FOREIGN and name[:3] != "MS_"}
    python_path = [str(_ROOT), env.get("PYTHONPATH", "")]
    env |= {
        "HARNESS_PARENT": str(os.getpid()),
        "HYPER_PARALLEL_PLATFORM": platform,
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WORLD_SIZE": str(world_size),
    }
    if platform == "torch":
        env |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
        if sys.platform.startswith("linux"):
            env["GLOO_SOCKET_IFNAME"] = "lo"
    elif platform == "mindspore":
        env |= {
            "MS_WORKER_NUM": str(world_size),
            "RANK_SIZE": str(world_size),
            "MS_SCHED_HOST": _HOST,
            "MS_SCHED_PORT": str(port),
            "MS_TOPO_TIMEOUT": "120",
            # Errors surface where they happen, and small operators are 40 times faster with two workers.
            "MS_DEV_LAUNCH_BLOCKING": "1",
            # Workers look for the scheduler every second, not every few.
            "MS_RETRY_INTERVAL_LOWER": "1",
            "MS_RETRY_INTERVAL_UPPER": "1",
            "GLOG_v": os.environ.get("GLOG_v", "3"),
        }
    return env


def _rank_environment(platform: str, rank: int) -> dict[str, str]:
    number = str(rank)
    if platform == "mindspore":
        own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": number, "RANK_ID": number, "DEVICE_ID": number}
    else:
        own = {"LOCAL_RANK": number}
    return {"RANK": number, **own}
