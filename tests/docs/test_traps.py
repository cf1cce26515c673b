"""The comparison table: this library's column as it is now, and the machinery that finds deadlocks."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from tests.docs.pages import ROOT
from tests.harness import run_distributed
from tools import compare_traps, trap_table
from tools.trap_table import LANGUAGES, Verdict
from tools.traps import OURS, OURS_NATIVE, TRAPS, Outcome


def run_here(library: str, trap: int, case: int) -> Outcome:
    from tools.trap_worker import run_program

    return run_program(library, trap, case)


def run_trap(trap: int, library: str) -> list[Verdict]:
    return [
        Verdict.of(run_distributed(run_here, library, trap, c, platform="torch", world_size=case.ranks, timeout=60))
        for c, case in enumerate(TRAPS[trap].cases)
    ]


@pytest.mark.platform("torch")
@pytest.mark.parametrize("number", range(1, len(TRAPS) + 1))
def test_the_table_says_what_happens(number: int) -> None:
    trap = TRAPS[number - 1]
    verdicts = run_trap(number - 1, OURS)
    if all(case.ranks == 2 for case in trap.cases):
        native = run_trap(number - 1, OURS_NATIVE)
        verdicts = [trap_table.merge(*pair) for pair in zip(verdicts, native, strict=True)]
    for language, name in LANGUAGES.items():
        row = trap_table.shown((ROOT / name).read_text(encoding="utf-8")).splitlines()[1 + number]
        assert row.startswith(f"| {number} | ")
        assert row.endswith(f" | {trap_table.cell(trap, verdicts, language)} |"), (
            "run python -m tools.compare_traps --write"
        )


RIGHT, BAD = Outcome("right"), Outcome("raised", "RuntimeError", "index", "backward")


@pytest.mark.parametrize(
    "answers, kind",
    [
        ([RIGHT, RIGHT], "right"),
        ([BAD, BAD], "raised"),
        ([BAD, None], "deadlock"),
        ([None, RIGHT], "deadlock"),
        ([None, None], "silence"),
        ([RIGHT, BAD], "mixed"),
    ],
)
def test_verdict_of_a_group(answers: list[Outcome | None], kind: str) -> None:
    assert Verdict.of(answers).outcome.kind == kind


def test_runs_that_differ_are_not_merged() -> None:
    assert trap_table.merge(Verdict(RIGHT), Verdict(RIGHT)) == Verdict(RIGHT)
    assert trap_table.merge(Verdict(RIGHT), Verdict(BAD)).outcome.kind == "mixed"


def test_a_silent_rank_is_found() -> None:
    (ours, theirs), (silent, _), (gone, dead) = Pipe(), Pipe(), Pipe()
    theirs.send(RIGHT)
    dead.close()
    assert compare_traps._next_messages([ours, silent, gone], seconds=5.0, grace=0.2) == [RIGHT, None, None]


def test_markers_must_stand_there_once() -> None:
    page = f"a\n{trap_table.BEGIN}\nold\n{trap_table.END}\nb\n"
    assert trap_table.shown(trap_table.put_between_markers(page, "new", "page")) == "new"
    with pytest.raises(ValueError, match="page needs one line"):
        trap_table.put_between_markers("no markers", "new", "page")
