"""The text of a failure: who did what, the first cause first, then tracebacks and output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.harness.launch import Process
from tests.harness.protocol import Failure, Message


@dataclass
class Outcome:
    """What became of one rank in one call."""

    rank: int
    process: Process
    answer: Message | None = None
    died: bool = False

    @property
    def silent(self) -> bool:
        """The rank runs and has not answered."""
        return self.answer is None and not self.died


def ranks_where(outcomes: Sequence[Outcome], chosen: Callable[[Outcome], bool]) -> tuple[int, ...]:
    """The ranks whose outcome is `chosen`."""
    return tuple(o.rank for o in outcomes if chosen(o))


def describe(
    outcomes: Sequence[Outcome],
    helpers: Sequence[Process],
    what: str,
    waited: str,
    wanted: type[Message],
) -> str:
    """Say what became of every rank of a call in which something went wrong."""
    facts = _facts(outcomes, waited, wanted)
    lines = [f"{what}: {'; '.join(facts)}"]
    for ranks, text in _by_text(outcomes, _traceback):
        lines += [f"--- traceback of {ranks} ---", text.rstrip()]
    for ranks, text in _by_text(outcomes, _output):
        lines += [f"--- output of {ranks} ---", text.rstrip()]
    for helper in helpers:
        if not helper.is_running():
            lines += [f"--- the scheduler {helper.how_it_ended()}; its output ---", helper.log.tail()]
    return "\n".join(lines)


def _facts(outcomes: Sequence[Outcome], waited: str, wanted: type[Message]) -> list[str]:
    def fact(outcome: Outcome) -> tuple[int, str]:
        if outcome.died:
            return 0, outcome.process.how_it_ended()
        if outcome.silent:
            return 2, f"did not answer {waited}"
        if isinstance(outcome.answer, wanted):
            return 3, "did as expected"
        if isinstance(outcome.answer, Failure):
            return 1, f"raised {outcome.answer.type}: {outcome.answer.message}"
        return 1, "returned, where every rank was expected to raise"

    by_fact: dict[tuple[int, str], list[int]] = {}
    for outcome in outcomes:
        by_fact.setdefault(fact(outcome), []).append(outcome.rank)
    return [f"{_name(ranks)} {text}" for (_, text), ranks in sorted(by_fact.items())]


def _traceback(outcome: Outcome) -> str:
    return outcome.answer.traceback if isinstance(outcome.answer, Failure) else ""


def _output(outcome: Outcome) -> str:
    return outcome.process.log.tail()


def _by_text(outcomes: Sequence[Outcome], text: Callable[[Outcome], str]) -> list[tuple[str, str]]:
    """Ranks that have the same to say, said once."""
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        if found := text(outcome):
            groups.setdefault(found, []).append(outcome.rank)
    return [(_name(ranks), found) for found, ranks in groups.items()]


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
