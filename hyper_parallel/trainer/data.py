"""Batches as a function of seed and step: the position needs no state, and all tp ranks get the same."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hyper_parallel.trainer.text import ByteTokenizer

__all__ = ["IGNORE_INDEX", "Batch", "PackedText"]

IGNORE_INDEX = -100
"""Label of a token that has no loss."""


class Batch(NamedTuple):
    """Token ids and the id that follows each, both int64 ``[batch, length]``."""

    tokens: np.ndarray
    labels: np.ndarray

    @property
    def valid_tokens(self) -> int:
        """How many labels count."""
        return int((self.labels != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class PackedText:
    """Documents laid end to end and cut into windows; each epoch visits them in an order of its own.

    Args:
        tokens: the documents, as :func:`~hyper_parallel.trainer.text.read_tokens` gives them.
        sequence_length: tokens of a window.
        batch_size: windows of a batch, over all data-parallel ranks.
        seed: the order depends on it.

    Raises:
        ValueError: fewer windows than one batch takes.

    Example:
        >>> text = PackedText(np.arange(101, dtype=np.uint16), sequence_length=10, batch_size=4, seed=0)
        >>> text.batch(step=7).tokens.shape
        (4, 10)
    """

    tokens: np.ndarray
    sequence_length: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < self.batch_size:
            raise ValueError(
                f"{len(self.tokens)} tokens of text give {self.windows} windows of {self.sequence_length}; "
                f"a batch needs {self.batch_size}: use more text, shorter windows or a smaller batch"
            )

    @property
    def windows(self) -> int:
        """Windows in the text; the last one still has a label for each of its tokens."""
        return max(0, len(self.tokens) - 1) // self.sequence_length

    @property
    def fingerprint(self) -> int:
        """32 bits that differ between different texts."""
        return zlib.crc32(self.tokens.tobytes())

    def batch(self, step: int, dp_rank: int = 0, dp_size: int = 1) -> Batch:
        """The rows of batch ``step`` that belong to one data-parallel rank, and so to all its tp ranks.

        Raises:
            ValueError: the batch cannot be dealt out evenly.
        """
        if self.batch_size % dp_size:
            raise ValueError(f"a batch of {self.batch_size} cannot be dealt out to {dp_size} data-parallel ranks")
        rows = self.batch_size // dp_size
        per_epoch = self.windows // self.batch_size
        epoch, index = divmod(step, per_epoch)
        first = index * self.batch_size + dp_rank * rows
        chosen = _order(self.seed, epoch, self.windows)[first : first + rows]
        span = np.arange(self.sequence_length + 1)
        ids = self.tokens[chosen[:, None] * self.sequence_length + span].astype(np.int64)
        tokens, labels = ids[:, :-1], ids[:, 1:].copy()
        # What follows the end of a document is another document's beginning: nothing to learn there.
        labels[tokens == ByteTokenizer.eos_id] = IGNORE_INDEX
        labels[labels == ByteTokenizer.pad_id] = IGNORE_INDEX
        return Batch(tokens, labels)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=seed, counter=epoch << 128))
    return generator.permutation(windows)
