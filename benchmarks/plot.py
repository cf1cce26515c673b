"""A picture of the measured times and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import case_title

__all__ = ["plot_losses"]


def plot_losses(cases: list[dict[str, Any]], path: Path) -> str:
    """Bars of time and of peak memory, one row of pictures a case; what was done, in words."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no picture: matplotlib is not installed"
    figure, axes = pyplot.subplots(len(cases), 2, figsize=(11, 2.8 * len(cases)), squeeze=False)
    for (left, right), case in zip(axes, cases):
        names = list(case["losses"])[::-1]
        losses = [case["losses"][name] for name in names]
        colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        left.barh(names, [loss["forward"] * 1e3 for loss in losses], color=colors, alpha=0.6)
        left.barh(
            names,
            [loss["backward"] * 1e3 for loss in losses],
            left=[loss["forward"] * 1e3 for loss in losses],
            color=colors,
        )
        left.axvline(3e3 * case["logits_bytes"] / case["bandwidth"], color="black", linestyle=":")
        left.set_title(case_title(case), fontsize=8)
        left.set_xlabel("ms: forward (light), backward; dotted: the limit")
        right.barh(names, [(loss["peak_bytes"] or 0) / case["logits_bytes"] for loss in losses], color=colors)
        right.set_yticklabels([])
        right.set_xlabel("peak extra memory / local logits")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return f"picture in {path}"
