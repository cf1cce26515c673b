"""``hyper-parallel matrix``: what is supported, and which of it runs with what is installed here."""

from __future__ import annotations

import importlib.metadata
import json
import platform as host
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import tyro

import hyper_parallel

__all__ = ["MatrixOptions", "describe_matrix", "installed", "run"]

_DATA = "support_matrix.json"

_WORDS = {
    "passed": "runs here",
    "failed": "FAILS",
    "not run": "not tried",
    "no test": "no test",
}
"""State of a row in the suite's run -> what it means where the platform is installed."""


@dataclass(frozen=True)
class MatrixOptions:
    """Show each promise of the library, and whether it runs with the platforms that are installed here. The states are
    those of the test suite's run for this release; nothing is run now."""

    backend: Literal["torch", "mindspore"] | None = None
    """Show this platform only."""

    missing: bool = False
    """Show only rows that do not run here on some platform shown."""


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = tyro.cli(MatrixOptions, args=list(arguments), prog="hyper-parallel matrix")
    content = json.loads(files("hyper_parallel").joinpath(_DATA).read_text(encoding="utf-8"))
    if options.backend is not None:
        content["platforms"] = {options.backend: content["platforms"][options.backend]}
    width = shutil.get_terminal_size((100, 24)).columns
    print(describe_matrix(content, installed(content["platforms"]), missing=options.missing, width=width))
    return 0


def installed(platforms: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    for package in platforms:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_matrix(
    content: Mapping[str, Any], versions: Mapping[str, str], *, missing: bool = False, width: int = 100
) -> str:
    """The matrix in words.

    Args:
        content: what the test suite has written.
        versions: platform -> version of what is installed here.
        missing: leave out rows that run on all platforms.
        width: columns of the terminal.
    """
    names = content["platforms"]
    here = [f"{name} {versions.get(package, 'not installed')}" for package, name in names.items()]
    there = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        f"hyper_parallel {hyper_parallel.__version__} with {', '.join(here)}, Python {host.python_version()}",
        *textwrap.wrap(f"The states are from a run of the test suite with {there}.", width),
    ]
    for package, name in names.items():
        tried = content["versions"].get(name)
        if package in versions and versions[package].partition("+")[0] != (tried or "").partition("+")[0]:
            lines.append(f"The suite has not run with {name} {versions[package]}, but with {tried}.")
    part = None
    for row in content["rows"]:
        words = [_word(row, package, versions) for package in names]
        if missing and all(word in ("runs here", "-") for word in words):
            continue
        if row["part"] != part:
            part = row["part"]
            lines += ["", part, "  " + "  ".join([f"{'':<7}", *(f"{name:<13}" for name in names.values())]).rstrip()]
        head = "  " + "  ".join([f"{row['id']:<7}", *(f"{word:<13}" for word in words)]) + "  "
        text = textwrap.wrap(row["text"], max(30, width - len(head)))
        lines += [head + text[0], *(" " * len(head) + more for more in text[1:])]
    return "\n".join(lines)


def _word(row: Mapping[str, Any], package: str, versions: Mapping[str, str]) -> str:
    cell = row["cells"].get(package)
    if cell is None:
        return "-"  # not promised
    return _WORDS[cell["state"]] if package in versions else "not installed"
