"""How the time of our loss grows with tokens and with local classes; all sizes in turn."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fit import exponent
from benchmarks.timing import interleave
from benchmarks.torch_loss import measure_once
from benchmarks.torch_losses import Setting, available_losses

__all__ = ["run"]

_NAME = "ours: functional, in place"
_TOKENS, _CLASSES = (512, 1024, 2048, 4096), (65536, 131072, 262144, 524288)
"""Tokens with the second number of classes, classes with the first of tokens: all of them more than a cache holds."""


_NEXT_TO_NONE = 64
"""Classes of a call that costs what does not depend on their number: collectives, and arithmetic on a few tokens."""


def run(options: dict[str, Any]) -> dict[str, Any]:
    """CPU milliseconds of forward and backward by size, and the exponents (1: in proportion) of what is not fixed."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fixed = (_TOKENS[0], _NEXT_TO_NONE)
    grown = {(tokens, _CLASSES[1]) for tokens in _TOKENS} | {(_TOKENS[0], classes) for classes in _CLASSES}
    sizes = sorted({fixed} | grown)
    largest = max(tokens * classes for tokens, classes in sizes)
    pool = torch.randn(largest // size, generator=torch.Generator().manual_seed(rank))
    ways = {}
    for tokens, classes in sizes:
        loss = available_losses(Setting.make(tokens, classes), [_NAME])[0][_NAME]
        part = slice(0, tokens * classes // size)
        ways[f"{tokens} x {classes}"] = partial(measure_once, loss, pool[part].view(tokens, -1))
    for way in ways.values():
        way()
    found = interleave(ways, 3 if options["quick"] else 7, dist.barrier)
    times = dict(zip(sizes, (1e3 * found[name]["cpu"] for name in ways)))
    by_tokens = [times[n, _CLASSES[1]] - times[fixed] for n in _TOKENS]
    by_classes = [times[_TOKENS[0], v] - times[fixed] for v in _CLASSES]
    return {
        "exponents": {"tokens": exponent(_TOKENS, by_tokens), "local classes": exponent(_CLASSES, by_classes)},
        "ms": {name: round(found[name]["cpu"] * 1e3, 1) for name in ways},
    }
