"""A cost model of the loss's exchange: ``python -m benchmarks.communication``.

A message of s bytes takes ``alpha + s beta``: latency and time a byte. A collective's cost is its number of steps times
alpha and the bytes that the busiest link carries times beta, for the algorithms that libraries use:

- all-gather of s bytes a rank: recursive doubling, ``log2 P`` steps, ``(P - 1) s`` bytes;
- all-reduce of m bytes: halving and doubling (or a double tree), ``2 log2 P`` steps, ``2 (P - 1) / P m`` bytes.

Of a group over several nodes, the steps within a node cost the node's alpha, and those between nodes the network's;
the bytes between nodes travel at the network's beta and each node's own share at the node's. A library that works by
rings has the same bytes and up to ``P - 1`` steps instead of the logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Link", "gather_seconds", "logits_seconds", "most_tokens", "reduce_seconds", "table"]


@dataclass(frozen=True)
class Link:
    """How messages travel."""

    latency: float
    """Seconds a message, whatever its size."""

    bandwidth: float
    """Bytes a second and rank."""


WITHIN_NODE = Link(4e-6, 200e9)
BETWEEN_NODES = Link(12e-6, 25e9)
RANKS_PER_NODE = 8


def gather_seconds(ranks: int, tokens: int, bytes_per_token: float = 8.0) -> float:
    """One all-gather of the packed numbers (8 bytes a token; 12 on accelerators)."""
    return _gather(ranks, tokens * bytes_per_token)


def reduce_seconds(ranks: int, tokens: int) -> float:
    """An all-reduce of 4 bytes a token (maximum), then one of 8 (sum of exponentials, target logit)."""
    return _reduce(ranks, 4.0 * tokens) + _reduce(ranks, 8.0 * tokens)


def three_reductions_seconds(ranks: int, tokens: int) -> float:
    """What other libraries run: three all-reduces of 4 bytes a token."""
    return 3 * _reduce(ranks, 4.0 * tokens)


def logits_seconds(ranks: int, tokens: int, classes: int, itemsize: int = 2) -> float:
    """Gathering the logits instead."""
    return _gather(ranks, tokens * classes * itemsize / ranks)


def most_tokens(ranks: int, bytes_per_token: float = 8.0) -> float:
    """Up to this many tokens one all-gather is faster than two all-reduces."""
    fixed = reduce_seconds(ranks, 0) - gather_seconds(ranks, 0)
    each = gather_seconds(ranks, 1, bytes_per_token) - gather_seconds(ranks, 0)
    each -= reduce_seconds(ranks, 1) - reduce_seconds(ranks, 0)
    return math.inf if each <= 0 else fixed / each


def _gather(ranks: int, share: float) -> float:
    inside, nodes = min(ranks, RANKS_PER_NODE), max(1, ranks // RANKS_PER_NODE)
    latency = math.log2(inside) * WITHIN_NODE.latency + math.log2(nodes) * BETWEEN_NODES.latency
    within = (ranks - nodes) * share / WITHIN_NODE.bandwidth  # what other members of the node hand on
    return latency + within + (nodes - 1) * share / BETWEEN_NODES.bandwidth


def _reduce(ranks: int, size: float) -> float:
    inside, nodes = min(ranks, RANKS_PER_NODE), max(1, ranks // RANKS_PER_NODE)
    latency = 2 * math.log2(inside) * WITHIN_NODE.latency + 2 * math.log2(nodes) * BETWEEN_NODES.latency
    within = 2 * (inside - 1) / inside * size / WITHIN_NODE.bandwidth
    return latency + within + 2 * (nodes - 1) / nodes * size / inside / BETWEEN_NODES.bandwidth


def table(tokens: int = 8192, classes: int = 128256) -> str:
    """Microseconds by the number of ranks."""
    lines = [
        f"{tokens} tokens, {classes} classes in bf16, microseconds",
        "ranks  gather  MAX+SUM  three all-reduces  logits gathered  gather wins up to",
    ]
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        limit = most_tokens(ranks)
        times = [
            gather_seconds(ranks, tokens),
            reduce_seconds(ranks, tokens),
            three_reductions_seconds(ranks, tokens),
            logits_seconds(ranks, tokens, classes),
        ]
        gather, reduce, three, logits = (f"{1e6 * t:.0f}" for t in times)
        most = "any size" if math.isinf(limit) else f"{limit:.0f} tokens"
        lines.append(f"{ranks:5d} {gather:>7s} {reduce:>8s} {three:>18s} {logits:>16s}  {most}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
