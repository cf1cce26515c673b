"""Turn contract rows and test results into docs/support_matrix.md, and the data that `hyper-parallel matrix` shows.

The rows stand in tests/contract_rows.yaml, tests name them with `@pytest.mark.contract("ID")`, and
`pytest --write-matrix` writes both (tests/contract_plugin.py collects the results).
"""

from __future__ import annotations

import platform as host
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

PLATFORMS = {"torch": "PyTorch", "mindspore": "MindSpore"}
_FIELDS = {"text", "promised", "due", "neutral"}


@dataclass(frozen=True)
class Row:
    """One promise."""

    id: str
    part: str
    text: str
    promised: tuple[str, ...]
    """The platforms that it is made for."""
    due: tuple[str, ...]
    """The platforms on which the suite fails when no test proves it."""
    neutral: bool
    """Whether tests that touch no framework prove it (for every platform)."""


@dataclass(frozen=True)
class Result:
    """What a test said about a row on a platform."""

    row: str
    platform: str
    outcome: str
    """"passed", "failed" or "skipped"."""
    reason: str = ""


def load_rows(path: Path) -> dict[str, Row]:
    """Read the rows, by id. Raises ValueError naming the row and what is wrong with it."""
    rows: dict[str, Row] = {}
    for part, entries in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        for id, entry in entries.items():
            if id in rows:
                raise ValueError(f"{path}: row {id} stands there twice")
            rows[id] = _row(id, part, entry, path)
    return rows


def _row(id: str, part: str, entry: Mapping[str, object], path: Path) -> Row:
    if unknown := set(entry) - _FIELDS:
        raise ValueError(f"{path}: row {id} has {sorted(unknown)}, expected only {sorted(_FIELDS)}")
    text, neutral = entry.get("text"), entry.get("neutral", False)
    promised, due = entry.get("promised", list(PLATFORMS)), entry.get("due", [])
    if not isinstance(text, str) or not isinstance(neutral, bool):
        raise ValueError(
            f"{path}: row {id} has text {text!r}, neutral {neutral!r}; expected a string and a bool"
        )
    if not isinstance(promised, list) or not isinstance(due, list):
        raise ValueError(f"{path}: row {id} has promised {promised!r}, due {due!r}; expected lists")
    if not set(promised) <= set(PLATFORMS) or not set(due) <= set(promised):
        raise ValueError(
            f"{path}: row {id} has promised {promised}, due {due}; expected due within promised "
            f"within {list(PLATFORMS)}"
        )
    return Row(id, part, text, tuple(promised), tuple(due), neutral)


def missing_tests(
    rows: Iterable[Row], tested: Collection[tuple[str, str]], *, only_due: bool = False
) -> list[tuple[str, str]]:
    """The (row id, platform) pairs that are promised, or due, and not among those `tested`."""
    return [
        (row.id, platform)
        for row in rows
        for platform in (row.due if only_due else row.promised)
        if (row.id, platform) not in tested
    ]


def installed_versions() -> dict[str, str]:
    """The versions that the results were obtained with."""
    versions = {"Python": host.python_version()}
    for package, name in {**PLATFORMS, "numpy": "NumPy"}.items():
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def state(results: Collection[Result]) -> str:
    """The same in one word: "failed", "passed", "not run" or "no test"."""
    outcomes = {result.outcome for result in results}
    for outcome in ("failed", "passed"):
        if outcome in outcomes:
            return outcome
    return "not run" if outcomes else "no test"


def cell(results: Collection[Result]) -> str:
    """One row on one platform, in words: failures first, and why something did not run."""
    if not results:
        return "no test"
    count = Counter(result.outcome for result in results)
    if count["failed"]:
        return f"**failed** ({count['failed']} of {len(results)})"
    reasons = "; ".join(sorted({result.reason for result in results if result.outcome == "skipped"}))
    if not count["passed"]:
        return f"not run here: {reasons}"
    rest = f", {count['skipped']} not run here: {reasons}" if count["skipped"] else ""
    return f"passed ({count['passed']}{rest})"


def matrix(rows: Iterable[Row], results: Iterable[Result], versions: Mapping[str, str]) -> dict[str, Any]:
    """All that the page says, as JSON has it. A row has a cell for each platform that it is promised on."""
    by_cell: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_cell.setdefault((result.row, result.platform), []).append(result)
    entries = []
    for row in rows:
        found = {platform: by_cell.get((row.id, platform), []) for platform in row.promised}
        cells = {platform: {"state": state(of), "text": cell(of)} for platform, of in found.items()}
        entries.append({"id": row.id, "part": row.part, "text": row.text, "cells": cells})
    return {"versions": dict(versions), "platforms": PLATFORMS, "rows": entries}


def render(content: Mapping[str, Any]) -> str:
    """The page, in Markdown, from what :func:`matrix` gives."""
    names = content["platforms"]
    lines = [
        "# Support matrix",
        "",
        "Written by the test suite (`pytest --write-matrix`). A cell tells what the tests that prove the row",
        "did: *passed* with their number, *failed*, *not run here* and why, *no test* where none proves it,",
        "— where the row is not promised. The rows are described in `tests/contract_rows.yaml`.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in content["versions"].items()) + ".",
    ]
    part = None
    for row in content["rows"]:
        if row["part"] != part:
            part = row["part"]
            lines += [
                "",
                f"## {part}",
                "",
                "| Row | What must work | " + " | ".join(names.values()) + " |",
            ]
            lines += ["|---" * (2 + len(names)) + "|"]
        cells = [row["cells"].get(platform, {"text": "—"})["text"] for platform in names]
        lines.append("| " + " | ".join(_escape(text) for text in (row["id"], row["text"], *cells)) + " |")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
