"""Which releases of the frameworks the suite is run on, and the page that says how that went (see noxfile.py)."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

RELEASES = {
    "torch": ("2.12.0", "2.13.0", "2.15.0"),
    "mindspore": ("2.10.0",),
}
"""The oldest supported release comes first."""

REFUSED = ("torch 2.8.0", "mindspore 2.9.0")
"""Older ones, which have to be refused by name."""

UNSUPPORTED = ("mindspore 2.9.0",)
"""Of these, the ones that the suite is run on all the same, with the refusal taken out: what they are refused for."""

PART = tuple(f"tests/{name}" for name in ("conformance", "core", "torch", "mindspore", "tensor_parallel", "checkpoint"))
"""What depends on a release: all but documentation, the trainer's processes and the harness."""

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
_BOUNDS = {
    "torch": "hyper_parallel/platform/torch/platform.py",
    "mindspore": "hyper_parallel/platform/mindspore/_versions.py",
}
_ROW = re.compile(r"^\| (PyTorch|MindSpore) \| ([\w.]+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
_REFUSED_ROW = re.compile(r"^\| (PyTorch|MindSpore) \| ([\w.]+) \| ([^|\n]*is too old[^|\n]*) \|$", re.MULTILINE)
_NAMES = {"torch": "PyTorch", "mindspore": "MindSpore"}


def copy_without_refusal(framework: str, release: str, target: Path) -> None:
    """Copy the sources into a new folder, and have them take a release that they refuse.

    Raises:
        ValueError: the line that refuses it is not where it was.
    """
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".*", "build", "outputs", "*.egg-info", "*.so"))
    file = target / _BOUNDS[framework]
    text, count = re.subn(
        r"^_OLDEST = \(\d+, \d+\)", f"_OLDEST = {numbers(release)[:2]}", file.read_text(encoding="utf-8"), flags=re.M
    )
    if count != 1:
        raise ValueError(f"{file} has {count} lines with _OLDEST; expected one")
    file.write_text(text, encoding="utf-8")


def read_results(page: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """From (framework, release) to passed, failed and skipped tests."""
    return {(m[1], m[2]): (int(m[3]), int(m[4]), int(m[5])) for m in _ROW.finditer(page)}


def write_result(framework: str, release: str, report: str) -> int:
    """Put one run's row into the page; returns how many tests failed.

    Args:
        framework: ``"torch"`` or ``"mindspore"``.
        release: the release that was installed.
        report: path of the run's JUnit XML file.
    """
    passed, failed, skipped = _count(Path(report))
    _put_row(_ROW, framework, release, f"{passed} | {failed} | {skipped}")
    return failed


def read_refusals(page: str) -> dict[tuple[str, str], str]:
    """From (framework, release) to what is said on it."""
    return {(m[1], m[2]): m[3] for m in _REFUSED_ROW.finditer(page)}


def write_refusal(framework: str, release: str, message: str) -> None:
    """Put into the page what ``get_platform()`` says of a release that is not supported."""
    _put_row(_REFUSED_ROW, framework, release, message)


def _put_row(pattern: re.Pattern[str], framework: str, release: str, cells: str) -> None:
    """Into the table whose rows have the pattern, in order, in the place of the one that is there of this release."""
    page = PAGE.read_text(encoding="utf-8")
    found = list(pattern.finditer(page))
    rows = {(m[1], m[2]): m[0] for m in found}
    name = _NAMES[framework]
    rows[name, release] = f"| {name} | {release} | {cells} |"
    lines = [rows[key] for key in sorted(rows, key=lambda key: (key[0] != "PyTorch", numbers(key[1])))]
    PAGE.write_text(page[: found[0].start()] + "\n".join(lines) + page[found[-1].end() :], encoding="utf-8")


def _count(report: Path) -> tuple[int, int, int]:
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - failed - skipped, failed, skipped


def numbers(release: str) -> tuple[int, ...]:
    """A release as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", release))
