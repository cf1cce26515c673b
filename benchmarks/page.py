"""Put measured results into the documentation: ``python -m benchmarks.page``.

Reads ``benchmarks/results/*.json`` and rewrites what stands between the markers of ``docs/guide/performance.md`` and
of both READMEs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.report import case_title, fitted, markdown, simple_table

__all__ = ["full_tables", "rewritten", "short_table"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/guide/performance.md", "README.md", "README.zh-CN.md")


def results() -> dict[str, dict[str, Any]]:
    """By backend."""
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def full_tables(found: dict[str, dict[str, Any]]) -> str:
    """Every suite of every backend."""
    parts = []
    for backend, result in found.items():
        versions = ", ".join(f"{k} {v}" for k, v in result["machine"]["versions"].items() if v != "not installed")
        parts.append(f"### {backend}\n\n{result['machine']['processor']}. {versions}.")
        for suite, title in _TITLES.items():
            if suite in result and "failed" not in result[suite]:
                parts.append(f"#### {title}\n\n{_suite(suite, result[suite])}")
    return "\n\n".join(parts)


_TITLES = {
    "loss": "The loss, forward and backward",
    "fit": "How the time grows",
    "exchange": "The exchange of statistics",
    "linear": "Last layer and loss in one",
    "dispatch": "A DTensor operator on tiny tensors, microseconds",
    "step": "A training step",
}


def _suite(suite: str, measured: Any) -> str:
    if suite == "loss":
        return markdown(measured)
    if suite == "fit":
        return fitted(measured)
    return simple_table(measured)


def short_table(found: dict[str, dict[str, Any]]) -> str:
    """Time and memory of the largest problems of PyTorch, in units of ours."""
    cases = [case for case in found.get("torch", {}).get("loss", []) if case["tokens"] * case["classes"] >= 1 << 25]
    if not cases:
        return ""
    lines = []
    for case in cases:
        ours = case["losses"]["ours: functional"]
        lines += [f"{case_title(case)}:", "", "| | CPU time, of ours | peak memory, of the local logits |"]
        lines.append("|---|---:|---:|")
        for name, loss in case["losses"].items():
            peak = (loss["peak_bytes"] or 0) / case["logits_bytes"]
            lines.append(f"| {name} | {loss['cpu'] / ours['cpu']:.2f} | {peak:.2f} |")
        lines.append("")
    return "\n".join(lines).strip()


def rewritten(text: str, found: dict[str, dict[str, Any]]) -> str:
    """A page with its marked parts filled in."""
    for name, part in (("benchmark tables", full_tables(found)), ("benchmark summary", short_table(found))):
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        filled = f"{begin}\n{part}\n{end}"
        text = pattern.sub(filled.replace("\\", r"\\"), text)
    return text


def main() -> None:
    """Rewrite the pages."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(rewritten(path.read_text(encoding="utf-8"), results()), encoding="utf-8")


if __name__ == "__main__":
    main()
