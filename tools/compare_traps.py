"""PyTorch's ``loss_parallel`` and this library's on the same traps, side by side.

Run from the repository root, with the PyTorch backend installed::

    python -m tools.compare_traps             # print the table
    python -m tools.compare_traps --write     # put it into README.md and README.zh-CN.md
    python -m tools.compare_traps --check     # fail when the table there is another one

Every program of :mod:`tools.trap_cases` runs in a process group of its own on local gloo ranks, and is compared
with the single-process ``F.cross_entropy`` in float64. A rank that does not answer although another one has is in a
deadlock; when none answers in time it is a hang. The ranks are killed then. This library runs each program twice: on
its own DTensor, and on PyTorch's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tools.trap_table import LANGUAGES, Verdict, merge, put_between_markers, render
from tools.traps import OURS, OURS_NATIVE, THEIRS, TRAPS

__all__ = ["compare", "main"]

_ROOT = Path(__file__).resolve().parents[1]
_START_SECONDS = 60.0  # until a rank is ready; a busy machine is slow
_ANSWER_SECONDS = 15.0  # from then to the first answer
_GRACE_SECONDS = 10.0  # for the other ranks, which take as long as the first one
_AT_ONCE = 3  # programs
_START_LATE = ["torch._dynamo", "torch._inductor.standalone_compile", "hyper_parallel"]
"""Imported before the ranks are forked: each would do so on its first operator otherwise."""


def compare() -> list[list[list[Verdict]]]:
    """Run everything. Verdicts by trap, by library (PyTorch, ours), by program."""
    os.environ.update({"OMP_NUM_THREADS": "1", "HYPER_PARALLEL_PLATFORM": "torch", "PYTHONWARNINGS": "ignore"})
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.trap_worker", *_START_LATE])
    libraries = (THEIRS, OURS, OURS_NATIVE)
    jobs = [
        (library, t, c, case.ranks)
        for t, trap in enumerate(TRAPS)
        for c, case in enumerate(trap.cases)
        for library in libraries
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        verdicts = dict(zip(jobs, pool.map(lambda job: _run(context, *job), jobs), strict=True))
    found: dict[tuple[str, int, int], Verdict] = {job[:3]: verdict for job, verdict in verdicts.items()}
    return [
        [
            [found[THEIRS, t, c] for c in range(len(trap.cases))],
            [merge(found[OURS, t, c], found[OURS_NATIVE, t, c]) for c in range(len(trap.cases))],
        ]
        for t, trap in enumerate(TRAPS)
    ]


def _run(context: Any, library: str, trap: int, case: int, ranks: int) -> Verdict:
    """One program with one library in a group of its own, which is gone afterwards."""
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="traps-") as folder:
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=start_rank, args=(library, trap, case, rank, folder, theirs), daemon=True
                )
                process.start()
                processes.append(process)
                pipes.append(ours)
                theirs.close()
            return Verdict.of(_collect(pipes))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def start_rank(*arguments: Any) -> None:
    """Runs in the new process; this one never loads a framework."""
    from tools.trap_worker import run_rank

    run_rank(*arguments)


def _collect(pipes: Sequence[Connection]) -> list[Any]:
    """The answer of each rank, None for one that gave none in time or died."""
    _next_messages(pipes, _START_SECONDS, _START_SECONDS)
    return _next_messages(pipes, _ANSWER_SECONDS, _GRACE_SECONDS)


def _next_messages(pipes: Sequence[Connection], seconds: float, grace: float) -> list[Any]:
    """One message of each rank: the first within ``seconds``, the others within ``grace`` of the one before."""
    messages: dict[Connection, Any] = {}
    deadline = time.monotonic() + seconds
    while (pending := [p for p in pipes if p not in messages]) and (left := deadline - time.monotonic()) > 0:
        ready = wait(pending, left)
        for pipe in pending:
            if pipe in ready:
                try:
                    messages[pipe] = pipe.recv()
                except EOFError:
                    messages[pipe] = None
        if ready:
            deadline = min(deadline, time.monotonic() + grace)
    return [messages.get(pipe) for pipe in pipes]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 when ``--check`` finds another table."""
    parser = argparse.ArgumentParser(prog="python -m tools.compare_traps", description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="put the table into " + " and ".join(LANGUAGES.values()))
    mode.add_argument("--check", action="store_true", help="exit with 1 when the table there is another one")
    options = parser.parse_args(arguments)

    verdicts = compare()
    version = metadata.version("torch").split("+")[0]
    stale = []
    for language, name in LANGUAGES.items():
        table = render(verdicts, version, language)
        if not options.write and not options.check:
            print(table)
            break
        path = _ROOT / name
        before = path.read_text(encoding="utf-8")
        after = put_between_markers(before, table, name)
        if after != before:
            stale.append(name)
            if options.write:
                path.write_text(after, encoding="utf-8")
    if options.write:
        print(f"changed: {', '.join(stale) or 'nothing'}")
    elif options.check and stale:
        print(f"{', '.join(stale)} hold another table; run python -m tools.compare_traps --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
