"""Memory and communication of the loss, by arithmetic alone: ``python -m tools.memory_table``.

The tables of docs/guide/memory.md; the page's tests run them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform.loss_statistics import choose_strategy

__all__ = ["LLAMA_3_70B", "LLAMA_3_8B", "Sizes", "logits_table", "main", "model_table"]

_LOSS_BYTES = {"cpu": 8, "accelerator": 12}


@dataclass(frozen=True)
class Sizes:
    """A Llama's sizes, as its ``config.json`` has them."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    classes: int = 128256

    def parameters(self, ranks: int) -> int:
        """Numbers that the rank with the most of them holds; 0 where the heads cannot be shared so."""
        if self.heads % ranks or (self.key_value_heads % ranks and ranks % self.key_value_heads):
            return 0
        head = self.hidden // self.heads
        queries, key_values = self.heads // ranks, max(self.key_value_heads // ranks, 1)
        attention = self.hidden * head * 2 * (queries + key_values)
        feed_forward = 3 * self.hidden * _largest(self.inner, ranks)
        norms = 2 * self.hidden
        ends = 2 * _largest(self.classes, ranks) * self.hidden + self.hidden
        return self.layers * (attention + feed_forward + norms) + ends


LLAMA_3_8B = Sizes("8B", 4096, 14336, 32, 32, 8)
LLAMA_3_70B = Sizes("70B", 8192, 28672, 80, 64, 8)


def logits_table(tokens: int = 8192, classes: int = 128256, itemsize: int = 2) -> str:
    """Bytes of logits and their gradient on a rank, and bytes that a rank receives for the loss.

    Args:
        tokens: those of a rank in a step.
        classes: of all ranks together.
        itemsize: bytes of a logit.
    """
    lines = [
        f"{tokens} tokens, {classes} classes, {itemsize} bytes a logit",
        " tp | logits and gradient, MiB | received for the loss, MiB",
        "    |  gathered      in shards |  gathered  CPU  accelerator",
    ]
    whole = tokens * classes * itemsize
    for ranks in (2, 4, 8, 16, 32, 64):
        own = tokens * _largest(classes, ranks) * itemsize
        gathered = whole * (ranks - 1) / ranks
        cpu, accelerator = (loss_bytes(ranks, tokens, each) for each in _LOSS_BYTES.values())
        lines.append(
            f"{ranks:3d} | {_mib(own + 2 * whole):9.0f} {_mib(2 * own):14.0f} | {_mib(gathered):9.0f} "
            f"{_mib(cpu):4.2f} {_mib(accelerator):12.2f}"
        )
    return "\n".join(lines)


def loss_bytes(ranks: int, tokens: int, each: int) -> float:
    """Bytes that a rank receives for the loss of ``tokens`` tokens, ``each`` of them a token in an all-gather."""
    if choose_strategy(ranks, tokens * 12) == "gather":
        return float((ranks - 1) * tokens * each)
    return 2 * (ranks - 1) / ranks * tokens * 12  # two all-reduces, of 4 and 8 bytes a token


def model_table(models: Sequence[Sizes] = (LLAMA_3_8B, LLAMA_3_70B)) -> str:
    """GiB of a rank: parameters in bf16; parameters, gradients and AdamW's two moments in fp32."""
    lines = ["model  tp  parameters a rank  bf16, GiB  training in fp32, GiB"]
    for model in models:
        for ranks in (1, 2, 4, 8, 16, 32, 64):
            count = model.parameters(ranks)
            if count:
                gib = count / 2**30
                lines.append(f"{model.name:>5} {ranks:3d} {count:18,d} {2 * gib:10.2f} {16 * gib:22.2f}")
    return "\n".join(lines)


def _largest(size: int, ranks: int) -> int:
    start, stop = chunk_ranges(size, ranks)[0]
    return stop - start


def _mib(size: float) -> float:
    return size / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tools.memory_table", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank in a step (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=128256, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of a logit (default: %(default)s)")
    options = parser.parse_args(argv)
    print(logits_table(options.tokens, options.classes, options.itemsize))
    print()
    print(model_table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
