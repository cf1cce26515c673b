"""Start the ranks of one measurement as processes of their own, and take what rank 0 found."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["RankFailed", "run_ranks"]

_ROOT = Path(__file__).resolve().parent.parent
_HOST = "127.0.0.1"
_SINGLE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class RankFailed(RuntimeError):
    """A rank ended with an error or the time ran out; the message has the end of its output."""


def run_ranks(suite: str, options: dict[str, Any], *, backend: str, size: int, timeout: float = 600.0) -> Any:
    """Run ``benchmarks.<suite>.run(options)`` in ``size`` processes of one group; rank 0's result (JSON)."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        result = Path(folder, "result.json")
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.worker", backend, suite, json.dumps(options), str(result)]
        started: list[tuple[subprocess.Popen[bytes], Path]] = []
        try:
            if backend == "mindspore":
                scheduler = [sys.executable, "-m", "benchmarks.worker", "scheduler", "", "", ""]
                log = Path(folder, "scheduler")
                started.append(_start(scheduler, {"MS_ROLE": "MS_SCHED"}, backend, size, port, log))
            for rank in range(size):
                started.append(_start(command, _of_rank(rank), backend, size, port, Path(folder, f"rank{rank}")))
            _wait(started[-size:], timeout)
        finally:
            for process, _ in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return json.loads(result.read_text())


def _of_rank(rank: int) -> dict[str, str]:
    number = str(rank)
    return {
        "RANK": number,
        "LOCAL_RANK": number,
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": number,
        "RANK_ID": number,
        "DEVICE_ID": number,
    }


def _start(
    command: list[str], own: dict[str, str], backend: str, size: int, port: int, log: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    environment = {
        **os.environ,
        **_SINGLE_THREAD,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")])),
        "HYPER_PARALLEL_PLATFORM": backend,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }
    if backend == "mindspore":
        environment |= {
            "MS_WORKER_NUM": str(size),
            "RANK_SIZE": str(size),
            "MS_SCHED_HOST": _HOST,
            "MS_SCHED_PORT": str(port),
            "MS_DEV_LAUNCH_BLOCKING": "1",
            "MS_RETRY_INTERVAL_LOWER": "1",
            "MS_RETRY_INTERVAL_UPPER": "1",
            "GLOG_v": "3",
        }
    else:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,  # MindSpore writes files where it runs
            start_new_session=True,
        )
    return process, log


def _wait(ranks: list[tuple[subprocess.Popen[bytes], Path]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process, _ in ranks):
        failed = [number for number, (process, _) in enumerate(ranks) if process.poll()]
        late = time.monotonic() > deadline
        if failed or late:
            number = failed[0] if failed else 0
            why = "failed" if failed else f"did not end within {timeout:.0f} s"
            raise RankFailed(f"rank {number} {why}:\n" + ranks[number][1].read_text(errors="replace")[-4000:])
        time.sleep(0.05)
    for number, (process, log) in enumerate(ranks):
        if process.returncode:
            raise RankFailed(f"rank {number} failed:\n" + log.read_text(errors="replace")[-4000:])
