"""Whatever ends one rank while the others wait for it in a collective ends the job in seconds, and is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.trainer.launch_environment import without_launcher
from hyper_parallel.trainer.launcher import JobFailed, run_job

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10.0
CASES = [
    pytest.param(platform, how, marks=pytest.mark.platform(platform))
    for platform, how in (
        ("torch", "an exception"),
        ("torch", "no memory"),
        ("torch", "an end that says that all is well"),
        ("mindspore", "no memory"),
        ("mindspore", "an end that says that all is well"),
    )
]

WORK = """
import os, sys
import numpy as np
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.launch_environment import is_scheduler
from hyper_parallel.trainer.worker import run_guarded

def work():
    platform = get_platform({platform!r})
    platform.ensure_initialized("cpu")
    if is_scheduler(os.environ):
        return 0
    group = platform.create_group([tuple(range(platform.world_size()))])
    for step in range(10**6):
        platform.all_reduce(platform.from_numpy(np.ones(3, np.float32)), "sum", group)
        if step == 5 and platform.rank() == 1:
            open({started!r}, "w").close()
            {end}
    return 0

sys.exit(run_guarded(work))
"""
ENDS = {
    "an exception": ("raise RuntimeError('no such luck')", "rank 1 failed: RuntimeError: no such luck"),
    "an end that says that all is well": (
        "os._exit(0)",
        "rank 1 failed: it ended with exit status 0 before its work was done",
    ),
    "no memory": ("bytearray(1 << 60)", "rank 1 failed: MemoryError"),
}


@pytest.mark.parametrize(("platform", "how"), CASES)
def test_it_is_named_and_ends_the_job(
    platform: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    end, message = ENDS[how]
    started = tmp_path / "started"
    code = WORK.format(platform=platform, started=str(started), end=end)
    with pytest.raises(JobFailed) as raised:
        run_job([sys.executable, "-c", code], nproc=2, backend=platform, log_folder=tmp_path)
    assert time.time() - os.stat(started).st_mtime < SECONDS
    assert str(raised.value).startswith(message)


@pytest.mark.platform("torch")
def test_under_torchrun_too(tmp_path: Path) -> None:
    end, message = ENDS["an exception"]
    started, program = tmp_path / "started", tmp_path / "program.py"
    program.write_text(WORK.format(platform="torch", started=str(started), end=end))
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    done = subprocess.run(
        [*torchrun, str(program)],
        env={**without_launcher(dict(os.environ)), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, cwd=tmp_path,
    )  # fmt: skip
    assert time.time() - os.stat(started).st_mtime < SECONDS
    assert done.returncode != 0
    assert message in done.stdout.splitlines(), done.stdout
