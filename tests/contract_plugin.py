"""Collect what the tests say about the contract (see tests/contract_rows.yaml)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.platforms import PLATFORMS, check_platform
from tools.support_matrix import Result, Row, installed_versions, load_rows, matrix, render

DEFAULT_PAGE = "docs/support_matrix.md"
PACKAGE_DATA = "hyper_parallel/support_matrix.json"
"""What ``hyper-parallel matrix`` shows; written with the page."""

ROWS_FILE = Path(__file__).with_name("contract_rows.yaml")
_PROPERTY = "contract"


def platform_of(item: pytest.Item) -> str | None:
    """The platform of a test: its `platform` parameter, else its mark; None: no framework."""
    callspec = getattr(item, "callspec", None)
    platform = callspec.params.get("platform") if callspec is not None else None
    if platform is None and (mark := item.get_closest_marker("platform")):
        platform = mark.args[0]
    if platform is not None:
        check_platform(platform)
    return platform


class ContractRecorder:
    """A pytest plugin: which rows the collected tests prove, and how that went."""

    def __init__(self, config: pytest.Config, rows: dict[str, Row]) -> None:
        self._config = config
        self.rows = rows
        self.tested: set[tuple[str, str]] = set()
        self.results: list[Result] = []
        self.problems: list[str] = []
        self.why_partial = _why_partial(config)

    @pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            cells = [cell for mark in item.iter_markers("contract") for cell in self._cells(item, mark)]
            self.tested.update(cells)
            if cells:
                # A property travels with the reports, also from another process.
                item.user_properties.append((_PROPERTY, cells))

    def _cells(self, item: pytest.Item, mark: pytest.Mark) -> list[tuple[str, str]]:
        """The cells of the matrix that `mark` claims for `item`; what is wrong with it goes to `problems`."""
        platform = platform_of(item)
        cells = []
        for id in mark.args:
            row = self.rows.get(id)
            if row is None:
                self.problems.append(f"{item.nodeid}: {ROWS_FILE.name} has no row {id!r}")
            elif platform is not None:
                cells.append((id, platform))
            elif row.neutral:
                cells += [(id, name) for name in row.promised]
            else:
                self.problems.append(
                    f"{item.nodeid}: proves row {id}, but on which platform? Expected a parameter or a mark "
                    f"`platform` ({' or '.join(PLATFORMS)}), or a row marked neutral"
                )
        return cells

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        outcome = "failed" if hasattr(report, "wasxfail") else report.outcome
        for name, cells in report.user_properties:
            if name == _PROPERTY:
                assert isinstance(cells, list)
                self.results += [Result(row, platform, outcome, _reason(report)) for row, platform in cells]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        target = self._config.getoption("write_matrix")
        if not target:
            return
        if self.why_partial:
            terminalreporter.write_line(f"{target} was not written: {self.why_partial}", red=True)
            return
        data = PACKAGE_DATA if target == DEFAULT_PAGE else str(Path(target).with_suffix(".json"))
        found = matrix(self.rows.values(), self.results, installed_versions())
        for name, text in {target: render(found), data: json.dumps(found, indent=1, ensure_ascii=False) + "\n"}.items():
            path = Path(self._config.rootpath, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            terminalreporter.write_line(f"wrote {name}")


def _why_partial(config: pytest.Config) -> str | None:
    """Why this run cannot speak for the whole suite, None when it can."""
    wanted = {(config.rootpath / path).resolve() for path in config.getini("testpaths")}
    given = {Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args}
    if not wanted <= given or config.getoption("keyword") or config.getoption("markexpr"):
        return "only a part of the suite was selected"
    return None


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return ""


def register(config: pytest.Config) -> None:
    """Add the recorder to the run."""
    config.pluginmanager.register(ContractRecorder(config, load_rows(ROWS_FILE)), "contract-recorder")
