"""From what the ranks answered to a Markdown table, in English and Chinese."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.traps import TRAPS, Outcome, Trap

__all__ = ["LANGUAGES", "Verdict", "cell", "merge", "put_between_markers", "render", "shown"]

LANGUAGES = {"en": "README.md", "zh": "README.zh-CN.md"}
"""Where the table of each language goes."""

BEGIN, END = "<!-- traps: written by tools/compare_traps.py -->", "<!-- end of traps -->"
_MESSAGE = 60  # characters of an error message

_PHRASES = {
    "right": ("right", "正确"),
    "wrong loss": ("**wrong loss**, no error", "**损失错误**，不报错"),
    "wrong gradient": ("**wrong gradient**, no error", "**梯度错误**，不报错"),
    "wrong both": ("**wrong loss and gradient**, no error", "**损失与梯度错误**，不报错"),
    "silent zero": ("**loss 0** for that token, no error", "该 token 的**损失为 0**，不报错"),
    "silent value": ("**some loss** for that token, no error", "该 token 得到**任意损失**，不报错"),
    "off": ("off again", "已关闭"),
    "still on": ("**still on**, for the whole process", "**仍然开启**，影响整个进程"),
    "outer back": ("outer settings come back", "恢复外层设置"),
    "outer lost": ("**outer settings lost**", "**外层设置丢失**"),
    "not seen": ("does not see it", "不受影响"),
    "seen": ("**sees it**", "**受影响**"),
    "unchanged": ("unchanged", "不变"),
    "changed": ("**overwritten**", "**被改写**"),
    "raised": ("{error} on every rank{phase}: {message}", "所有 rank {phase}抛出 {error}：{message}"),
    "deadlock": (
        "**deadlock**: one rank ends with {error}{phase}, the other waits",
        "**死锁**：一个 rank {phase}以 {error} 结束，另一个一直等待",
    ),
    "silence": ("**hang**: no rank comes back", "**挂起**：没有 rank 返回"),
    "mixed": ("**ranks disagree**: {parts}", "**各 rank 不一致**：{parts}"),
}
_BACKWARD = (" in backward", "在反向时")
_HEADER = (
    "| | Trap | PyTorch {version} `loss_parallel` | `hyper_parallel.loss_parallel` |",
    "| | 陷阱 | PyTorch {version} `loss_parallel` | `hyper_parallel.loss_parallel` |",
)
_PUNCTUATION = ((": ", "; "), ("：", "；"))


@dataclass(frozen=True)
class Verdict:
    """What a group came to: one outcome that stands for all ranks, or ``mixed`` with those of its ranks."""

    outcome: Outcome
    parts: tuple[Outcome, ...] = ()

    @classmethod
    def of(cls, answers: Sequence[Outcome | None]) -> Verdict:
        """Sum up the ranks' answers; None is a rank that never came back."""
        given = [answer for answer in answers if answer is not None]
        if not given:
            return cls(Outcome("silence"))
        raised = [answer for answer in given if answer.kind == "raised"]
        if len(given) < len(answers):
            first = raised[0] if raised else given[0]
            return cls(Outcome("deadlock", first.raised or first.kind, "", first.phase))
        if len({(a.kind, a.raised, a.phase) for a in given}) == 1:
            return cls(given[0])
        return cls(Outcome("mixed"), tuple(dict.fromkeys(given)))


def merge(one: Verdict, other: Verdict) -> Verdict:
    """Two runs that must agree, message apart."""
    same = (one.outcome.kind, one.outcome.raised) == (other.outcome.kind, other.outcome.raised)
    return one if same else Verdict(Outcome("mixed"), (one.outcome, other.outcome))


def render(verdicts: Sequence[Sequence[Sequence[Verdict]]], version: str, language: str) -> str:
    """The table; ``verdicts`` by trap, library and program."""
    index = list(LANGUAGES).index(language)
    lines = [_HEADER[index].format(version=version), "|---|---|---|---|"]
    for number, (trap, row) in enumerate(zip(TRAPS, verdicts, strict=True), 1):
        cells = [cell(trap, library, language) for library in row]
        lines.append("| " + " | ".join([str(number), trap.title[index], *cells]) + " |")
    return "\n".join(lines)


def cell(trap: Trap, verdicts: Sequence[Verdict], language: str) -> str:
    """What a library does about a trap, in words; ``verdicts`` by program."""
    index = list(LANGUAGES).index(language)
    texts = [_words(verdict.outcome, verdict.parts, index) for verdict in verdicts]
    if len(set(texts)) == 1:
        return texts[0]
    colon, semicolon = _PUNCTUATION[index]
    labels = [case.label[index] for case in trap.cases]
    return semicolon.join(f"{label}{colon}{text}" for label, text in zip(labels, texts, strict=True))


def shown(text: str) -> str:
    """The table between the markers of a page."""
    return text.split(BEGIN)[1].split(END)[0].strip()


def put_between_markers(text: str, table: str, name: str) -> str:
    """The page with ``table`` between its markers. Raises ValueError where it has not exactly one pair."""
    if Counter({BEGIN: text.count(BEGIN), END: text.count(END)}) != Counter({BEGIN: 1, END: 1}):
        raise ValueError(f"{name} needs one line {BEGIN!r} and one {END!r}")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _words(outcome: Outcome, parts: Sequence[Outcome], index: int) -> str:
    message = " ".join(outcome.message.split()).replace("|", "\\|").replace("<", "&lt;")
    if len(message) > _MESSAGE:
        message = message[:_MESSAGE].rsplit(" ", 1)[0] + " …"
    return _PHRASES[outcome.kind][index].format(
        error=f"`{outcome.raised}`",
        message=message,
        phase=_BACKWARD[index] if outcome.phase == "backward" else "",
        parts=_PUNCTUATION[index][1].join(_words(part, (), index) for part in parts),
    )
