"""The launcher: names the rank that failed and why, stops the others at once, leaves nobody behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_parallel.trainer.launcher import JobFailed, run_job

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import os, signal, sys, time
from hyper_parallel.trainer.worker import run_guarded
rank = int(os.environ["RANK"])
def work():
    {body}
    return 0
sys.exit(run_guarded(work))
"""
WAIT = "time.sleep(600)"


@pytest.fixture(autouse=True)
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def worker(body: str) -> list[str]:
    """A worker that runs ``body``, without a framework."""
    return [sys.executable, "-c", PRELUDE.format(body=body.replace("\n", "\n    "))]


def failure(body: str, folder: Path, nproc: int = 3) -> tuple[JobFailed, float]:
    """How a job fails, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(JobFailed) as raised:
        run_job(worker(body), nproc=nproc, backend="torch", log_folder=folder)
    return raised.value, time.monotonic() - began


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def pids(folder: Path, nproc: int) -> list[int]:
    """Of workers that wrote theirs to ``folder``."""
    files = [folder / f"pid{rank}" for rank in range(nproc)]
    assert eventually(lambda: all(f.exists() and f.read_text() for f in files), 30)
    return [int(f.read_text()) for f in files]


def note_pid(folder: Path) -> str:
    return f'open(f"{folder}/pid{{rank}}", "w").write(str(os.getpid()))'


def test_every_rank_learns_its_place(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS HYPER_PARALLEL_PLATFORM".split()
    body = f'print(*[os.environ[n] for n in {names}], file=open(f"{tmp_path}/{{rank}}", "w"))'
    run_job(worker(body), nproc=3, backend="torch", log_folder=tmp_path)
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert found == [[str(r), str(r), "3", "127.0.0.1", threads, "torch"] for r in range(3)]


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_is_named_with_its_rank(rank: int, tmp_path: Path) -> None:
    body = f"if rank == {rank}: raise RuntimeError('no such luck')\n{note_pid(tmp_path)}\n{WAIT}"
    error, seconds = failure(body, tmp_path)
    assert str(error) == f"rank {rank} failed: RuntimeError: no such luck"
    assert "Traceback" in error.details and "afterwards" not in error.details
    assert seconds < 10
    left = [int(f.read_text()) for f in tmp_path.glob("pid*") if f.read_text()]
    assert not any(is_running(pid) for pid in left)


def test_the_cause_is_named_and_not_its_consequence(tmp_path: Path) -> None:
    """Rank 0 fails because rank 1 has gone, as a rank does that waits in a collective."""
    gone = f"{tmp_path}/gone"
    body = (
        f"if rank == 1: open({gone!r}, 'w').close(); raise ValueError('first')\n"
        f"while not os.path.exists({gone!r}): time.sleep(0.001)\n"
        "time.sleep(0.3)\n"
        "raise ConnectionError('peer closed')"
    )
    error, _ = failure(body, tmp_path)
    assert str(error) == "rank 1 failed: ValueError: first"
    assert "afterwards rank 0: ConnectionError: peer closed" in error.details


def test_a_killed_rank_is_the_cause_though_others_leave_notes(tmp_path: Path) -> None:
    gone = f"{tmp_path}/gone"
    body = (
        f"if rank == 1: open({gone!r}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)\n"
        f"while not os.path.exists({gone!r}): time.sleep(0.001)\n"
        "raise ConnectionError('peer closed')"
    )
    error, seconds = failure(body, tmp_path)
    assert str(error).startswith("rank 1 failed: it was killed by SIGKILL")
    assert "afterwards rank 0: ConnectionError: peer closed" in error.details
    assert seconds < 10


def test_a_rank_that_leaves_without_a_word_shows_the_end_of_its_log(tmp_path: Path) -> None:
    body = f"if rank == 1: print('last words', flush=True); os._exit(7)\n{WAIT}"
    error, seconds = failure(body, tmp_path)
    assert str(error) == "rank 1 failed: it ended with exit status 7"
    assert error.details.endswith("rank1.log:\nlast words")
    assert seconds < 10


def test_the_same_error_on_all_ranks_is_told_once(tmp_path: Path) -> None:
    error, _ = failure("raise ValueError('wrong target')", tmp_path)
    assert str(error).endswith("failed: ValueError: wrong target")
    assert "afterwards" not in error.details


def launcher(folder: Path, body: str, nproc: int = 2) -> subprocess.Popen[str]:
    """A launcher in a process of its own, with its workers running."""
    script = textwrap.dedent(f"""
        from pathlib import Path
        from hyper_parallel.trainer.launcher import JobInterrupted, run_job
        try:
            run_job({worker(body)!r}, nproc={nproc}, backend="torch", log_folder=Path({str(folder)!r}))
        except JobInterrupted as stop:
            print(stop)
            raise SystemExit(128 + stop.signal_number)
    """)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_workers_finish_their_step(number: signal.Signals, tmp_path: Path) -> None:
    body = (
        "stop = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.append(1))\n"
        f"{note_pid(tmp_path)}\n"
        "while not stop: time.sleep(0.01)\n"
        f'open(f"{tmp_path}/done{{rank}}", "w").close()'
    )
    process = launcher(tmp_path, body)
    workers = pids(tmp_path, 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number and f"stopped by {number.name}" in out
    assert all((tmp_path / f"done{rank}").exists() for rank in range(2))
    assert not any(is_running(pid) for pid in workers)


def test_a_second_signal_does_not_wait_for_a_worker_that_will_not_stop(tmp_path: Path) -> None:
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{note_pid(tmp_path)}\n{WAIT}"
    process = launcher(tmp_path, body)
    workers = pids(tmp_path, 2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130 and time.monotonic() - began < 8
    assert not any(is_running(pid) for pid in workers)


def test_a_rank_that_is_killed_while_the_job_stops_is_named(tmp_path: Path) -> None:
    gone = f"{tmp_path}/gone"
    body = (
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        f"{note_pid(tmp_path)}\n"
        "signal.pause()\n"
        f"if rank == 1: open({gone!r}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)\n"
        f"while not os.path.exists({gone!r}): time.sleep(0.001)\n"
        "raise ConnectionError('peer closed')"
    )
    process = launcher(tmp_path, body)
    pids(tmp_path, 2)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "JobFailed: rank 1 failed: it was killed by SIGKILL" in errors.splitlines()[-1], errors


def test_ranks_that_stop_because_one_was_told_to_are_waited_for(tmp_path: Path) -> None:
    body = f'if rank == 1: return 130\ntime.sleep(1.0)\nopen(f"{tmp_path}/saved", "w").close()\nreturn 130'
    error, _ = failure(body, tmp_path, nproc=2)
    assert str(error) == "stopped by a signal (SIGINT or SIGTERM) to one of its ranks" and not error.details
    assert (tmp_path / "saved").exists()


def test_workers_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = launcher(tmp_path, f"{note_pid(tmp_path)}\n{WAIT}")
    workers = pids(tmp_path, 2)
    process.kill()
    process.communicate(timeout=20)
    try:
        assert eventually(lambda: not any(is_running(pid) for pid in workers))
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
