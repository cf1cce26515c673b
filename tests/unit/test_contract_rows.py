"""The contract file, the marks that name its rows, and the page made of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract_plugin import DEFAULT_PAGE, PACKAGE_DATA, ROWS_FILE, ContractRecorder
from tools.support_matrix import Result, Row, cell, load_rows, matrix, missing_tests, render, state

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def recorder(request: pytest.FixtureRequest) -> ContractRecorder:
    found = request.config.pluginmanager.get_plugin("contract-recorder")
    assert isinstance(found, ContractRecorder)
    return found


def test_marks_name_rows_and_platforms(recorder: ContractRecorder) -> None:
    assert not recorder.problems, "\n".join(recorder.problems)


def test_due_rows_have_tests(recorder: ContractRecorder) -> None:
    if recorder.why_partial:
        pytest.skip(recorder.why_partial)
    missing = missing_tests(recorder.rows.values(), recorder.tested, only_due=True)
    assert not missing, f"no test marked contract(ID) for these (row, platform): {missing}"


def test_every_promise_has_a_row() -> None:
    rows = load_rows(ROWS_FILE)
    expected = {
        "G": 5,
        "L": 3,
        "C": 5,
        "I": 4,
        "K": 3,
        "E": 4,
        "P": 4,
        "V": 2,
        "D": 1,
        "R": 4,
        "T": 4,
        "S": 4,
    }
    expected["TRAP"] = 13
    assert set(rows) == {f"{letter}{n}" for letter, count in expected.items() for n in range(1, count + 1)}
    assert rows["V1"].promised == ("torch",) and rows["TRAP13"].promised == ("mindspore",)


def test_missing_tests() -> None:
    rows = [
        Row("A", "Part", "a", ("torch", "mindspore"), due=("torch",), neutral=False),
        Row("B", "Part", "b", ("torch",), due=(), neutral=False),
    ]
    tested = {("A", "mindspore")}
    assert missing_tests(rows, tested) == [("A", "torch"), ("B", "torch")]
    assert missing_tests(rows, tested, only_due=True) == [("A", "torch")]
    assert missing_tests(rows, tested | {("A", "torch")}, only_due=True) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("P: {A: {text: a, promise: [torch]}}", "row A has .'promise'."),
        ("P: {A: {text: a, promised: [jax]}}", "row A has promised .'jax'."),
        ("P: {A: {text: a, promised: [torch], due: [mindspore]}}", "due .'mindspore'."),
        ("P: {A: {promised: [torch]}}", "row A has text None"),
        ("{P: {A: {text: a}}, Q: {A: {text: a}}}", "row A stands there twice"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rows(path)


def test_cells_say_what_happened() -> None:
    passed, failed = Result("A", "torch", "passed"), Result("A", "torch", "failed")
    skipped = Result("A", "torch", "skipped", "MindSpore is not installed")
    assert cell([]) == "no test"
    assert cell([passed, passed]) == "passed (2)"
    assert cell([passed, skipped, failed]) == "**failed** (1 of 3)"
    assert cell([skipped, skipped]) == "not run here: MindSpore is not installed"
    assert cell([passed, skipped]) == "passed (1, 1 not run here: MindSpore is not installed)"
    assert [state(s) for s in ([], [skipped], [skipped, passed], [passed, failed])] == [
        "no test",
        "not run",
        "passed",
        "failed",
    ]


def test_the_page_shows_the_data_of_the_package() -> None:
    content = json.loads((_ROOT / PACKAGE_DATA).read_text(encoding="utf-8"))
    assert (_ROOT / DEFAULT_PAGE).read_text(encoding="utf-8") == render(content)


def test_page() -> None:
    rows = [Row("A", "Part", "x | y", ("torch",), (), False)]
    page = render(matrix(rows, [Result("A", "torch", "passed")], {"Python": "3.11.7"}))
    assert "## Part" in page and "Versions: Python 3.11.7." in page
    assert "| A | x \\| y | passed (1) | — |" in page


_EXAMPLE_TESTS = """
import pytest

pytestmark = pytest.mark.contract("G1")

@pytest.mark.platform("torch")
def test_passes(): pass

@pytest.mark.platform("mindspore")
def test_skips(): pytest.skip("no such device")

@pytest.mark.platform("torch")
@pytest.mark.contract("G2")
@pytest.mark.xfail
def test_fails(): assert False

@pytest.mark.contract("D1")
def test_says_no_platform(): pass
"""

_EXAMPLE_CONFTEST = """
from tests import contract_plugin
from tests.conftest import pytest_addoption

def pytest_configure(config):
    contract_plugin.register(config)

def pytest_unconfigure(config):
    print(*config.pluginmanager.get_plugin("contract-recorder").problems)
"""


@pytest.mark.parametrize("selection", [[], ["-k", "passes"]], ids=["whole", "partial"])
def test_results_reach_the_page(tmp_path: Path, selection: list[str]) -> None:
    """Run pytest on a small suite of its own, with the plugin."""
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\ntestpaths = suite\npythonpath = {_ROOT}\n"
        "markers =\n    contract: rows\n    platform: name\n"
    )
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "conftest.py").write_text(_EXAMPLE_CONFTEST)
    (tmp_path / "suite" / "test_example.py").write_text(_EXAMPLE_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--write-matrix=out/m.md",
        *selection,
    ]
    env = {"PYTHONPATH": str(_ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert "test_says_no_platform: proves row G1, but on which platform?" in done.stdout, done.stdout
    page = tmp_path / "out" / "m.md"
    if selection:
        assert "out/m.md was not written: only a part of the suite was selected" in done.stdout
        assert not page.exists()
        return
    lines = {line.split(" | ")[0]: line.split(" | ")[2:] for line in page.read_text().splitlines()}
    assert lines["| G1"] == ["**failed** (1 of 2)", "not run here: no such device |"]
    assert lines["| G2"] == ["**failed** (1 of 1)", "no test |"]
    assert lines["| D1"] == ["passed (1)", "passed (1) |"]
    data = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert data["rows"][0]["cells"]["torch"] == {"state": "failed", "text": "**failed** (1 of 2)"}
