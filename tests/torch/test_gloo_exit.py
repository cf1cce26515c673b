"""A program that ends right after a collective ends with status 0, whoever holds the process group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.platform.torch import _gloo_exit

pytestmark = pytest.mark.platform("torch")

ROOT = Path(__file__).resolve().parents[2]

# Pairs of processes, forked so that they need not load PyTorch. With an interval this long gloo's threads get
# Python's lock only where the main thread lets go of it: without the wait at exit about every third pair aborts.
PROGRAM = """
import os, sys, torch
import torch.distributed as dist
from hyper_parallel import init_device_mesh

def work():
    sys.setswitchinterval(100)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for x in [torch.ones(1000) for _ in range(50)]:
        dist.all_reduce(x)
    return mesh

for pair in range(int(sys.argv[1])):
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[rank]:
            store = dist.FileStore(f"{sys.argv[2]}/{pair}", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            kept = work()
            sys.exit()
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


def test_a_program_that_ends_after_a_collective_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "10", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[0, 0]"] * 10, done.stderr


def test_threads_that_never_rest_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_gloo_exit, "_LONGEST", 0.05)
    monkeypatch.setattr(_gloo_exit, "_states", lambda: asked.append(1) or ["R", "S"])
    _gloo_exit._wait()
    assert 2 < len(asked) < 15


def test_a_name_that_is_cut_within_a_character(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, content in enumerate((b"1 (\xd0\xbe\xd0) S 2", b"3 (pt_gloo_runloop) R 4")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_bytes(content)
    monkeypatch.setattr(_gloo_exit, "_THREADS", tmp_path)
    assert _gloo_exit._states() == ["R"]


def test_without_gloo_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gloo_exit, "_states", list)
    monkeypatch.setattr(_gloo_exit.time, "sleep", lambda seconds: pytest.fail("it waits"))
    _gloo_exit._wait()
