"""Measure and write ``benchmark.json``, ``benchmark.md`` and ``benchmark.png``; see ``--help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from benchmarks.grid import loss_cases
from benchmarks.launch import RankFailed, run_ranks
from benchmarks.plot import plot_losses
from benchmarks.report import fitted, markdown, simple_table
from hyper_parallel.platform.native.rows import describe

_SUITES = ("loss", "fit", "exchange", "linear", "dispatch", "step")
_MINDSPORE_SUITES = ("loss", "dispatch", "step")
_PACKAGES = ("torch", "mindspore", "torchtitan", "megatron-core", "numpy")


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line names."""
    options = _parser().parse_args(arguments)
    suites = options.suites or (_MINDSPORE_SUITES if options.backend == "mindspore" else _SUITES)
    found: dict[str, Any] = {"machine": _machine(), "backend": options.backend, "ranks": options.ranks}
    versions = ", ".join(f"{name} {version}" for name, version in found["machine"]["versions"].items())
    text = [f"{found['machine']['processor']}; {versions}"]
    options.out.mkdir(parents=True, exist_ok=True)
    for suite in suites:
        start = time.perf_counter()
        try:
            found[suite], part = _measure(suite, options)
        except RankFailed as e:
            found[suite], part = {"failed": str(e)}, f"{suite} failed: {e}"
        print(f"\n== {suite} ({time.perf_counter() - start:.0f} s)\n\n{part}", flush=True)
        text.append(f"## {suite}\n\n{part}")
        # after each part: who stops the run keeps what there is
        (options.out / "benchmark.json").write_text(json.dumps(found, indent=1))
        (options.out / "benchmark.md").write_text("\n\n".join(text) + "\n")
    print(f"\nresults in {options.out}/benchmark.json and benchmark.md")
    if isinstance(found.get("loss"), list):
        print(plot_losses(found["loss"], options.out / "benchmark.png"))


def _measure(suite: str, options: argparse.Namespace) -> tuple[Any, str]:
    def run(module: str, arguments: dict[str, Any], size: int = options.ranks) -> Any:
        return run_ranks(module, arguments, backend=options.backend, size=size, timeout=options.timeout)

    if suite == "loss":
        tokens = options.tokens or ([256] if options.quick else [1024])
        classes = options.classes or ([32768] if options.quick else [131072])
        dtypes = options.dtypes or (["float32"] if options.backend == "mindspore" else ["float32", "bfloat16"])
        cases: list[dict[str, Any]] = []
        for dtype in dtypes:
            planned = list(loss_cases(options.quick, [dtype], tokens, classes))
            cases += run(f"{options.backend}_loss", {"cases": planned})
        if not options.quick and options.backend == "torch":
            small = list(loss_cases(options.quick, dtypes[:1], [512], [32768]))
            cases += run("torch_loss", {"cases": small}, 2 * options.ranks)
        return cases, markdown(cases)
    if suite == "fit":
        grown = run("torch_fit", {"quick": options.quick})
        return grown, fitted(grown)
    rows = run(f"{options.backend}_{suite}", {"quick": options.quick})
    return rows, simple_table(rows)


def _machine() -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    names = {line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")}
    cores = os.cpu_count()
    return {
        "processor": f"{', '.join(sorted(names)) or platform.machine()}, {cores} cores, one thread a rank; "
        f"our loss's kernels: {describe()}",
        "versions": versions,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[*_SUITES, []], help="default: all")
    parser.add_argument("--backend", choices=("torch", "mindspore"), default="torch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--classes", type=int, nargs="+")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--quick", action="store_true", help="small problems, few repetitions: half a minute")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one group of processes")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark"))
    return parser


if __name__ == "__main__":
    main()
