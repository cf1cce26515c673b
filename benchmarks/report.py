"""What was measured, as text for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.least import least_bytes

__all__ = ["case_title", "fitted", "markdown", "simple_table"]

Case = dict[str, Any]


def case_title(case: Case) -> str:
    """In words."""
    return f"{case['dtype']}, {case['tokens']} tokens x {case['classes']} classes, {case['size']} ranks"


def markdown(cases: list[Case]) -> str:
    """A table for each case: times as they were, and how often the fastest of ours fits into each."""
    return "\n\n".join("\n".join(_table(case)) for case in cases)


def _table(case: Case) -> Iterator[str]:
    least, bandwidth = least_bytes(case["logits_bytes"]), case["bandwidth"]
    limit = {part: size / bandwidth for part, size in least.items()}
    yield f"**{case_title(case)}**"
    yield ""
    yield (
        "| | forward ms | backward ms | both ms | of ours | CPU ms | of ours | of the limit | peak memory "
        "| collectives | sent |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|"
    ours = case["losses"].get("ours: functional") or next(iter(case["losses"].values()))
    for name, loss in case["losses"].items():
        times = " | ".join(f"{loss[part] * 1e3:.1f}" for part in ("forward", "backward", "both"))
        peak = "unknown" if loss["peak_bytes"] is None else f"{loss['peak_bytes'] / case['logits_bytes']:.2f}"
        collectives = ", ".join(f"{count} {what}" for what, count in loss["collectives"].items())
        yield (
            f"| {name} | {times} | {loss['both'] / ours['both']:.2f} | {loss['cpu'] * 1e3:.1f} "
            f"| {loss['cpu'] / ours['cpu']:.2f} | {loss['cpu'] / limit['both']:.1f} | {peak} "
            f"| {collectives} | {_bytes(loss['bytes_sent'])} |"
        )
    for name, why in case["missing"].items():
        yield f"| {name} | {why} | | | | | | | | | |"
    milliseconds = " | ".join(f"{limit[part] * 1e3:.1f}" for part in ("forward", "backward", "both"))
    name, both = f"limit: a copy moves {bandwidth / 1e9:.1f} GB/s on each rank", f"{limit['both'] * 1e3:.1f}"
    yield f"| *{name}* | {milliseconds} | | {both} | | 1.0 | | | |"


def simple_table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys."""
    if not rows:
        return ""
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(lines)


def fitted(found: dict[str, Any]) -> str:
    """The exponents, and what they come from."""
    lines = [f"- time ~ ({what})^{value:.2f}" for what, value in found["exponents"].items()]
    times = ", ".join(f"{name}: {ms} ms" for name, ms in found["ms"].items())
    return "\n".join([*lines, f"- tokens x classes, CPU time of forward and backward in place: {times}"])


def _bytes(count: int | None) -> str:
    if count is None:
        return "not counted"
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
