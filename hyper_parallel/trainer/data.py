"""Batches as a function of seed and step: the position is one number, and all tp ranks get the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hyper_parallel.trainer.data_tokens import DataError, Tokens

__all__ = ["IGNORE_INDEX", "Batch", "PackedText"]

IGNORE_INDEX = -100
"""Label of a token that has no loss."""


class Batch(NamedTuple):
    """Token ids, the id that follows each, and each one's place in its document; all int64 ``[batch, length]``.

    ``position_ids`` is None where documents are not told apart.
    """

    tokens: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None

    @property
    def valid_tokens(self) -> int:
        """How many labels count."""
        return int((self.labels != IGNORE_INDEX).sum())

    def rows(self, first: int, stop: int) -> Batch:
        """Some rows of it."""
        return Batch(*(None if a is None else a[first:stop] for a in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PackedText:
    """Documents laid end to end and cut into windows; each epoch visits them in an order of its own.

    Args:
        corpus: the documents.
        sequence_length: tokens of a window.
        batch_size: windows of a batch, over all data-parallel ranks.
        seed: the order depends on it.
        document_masks: give batches ``position_ids``, which start again at 0 with each document.

    Raises:
        DataError: fewer windows than one batch takes.

    Example:
        >>> text = PackedText(Tokens.of([np.arange(101)]), sequence_length=10, batch_size=4, seed=0)
        >>> text.batch(step=7).tokens.shape
        (4, 10)
    """

    corpus: Tokens
    sequence_length: int
    batch_size: int
    seed: int
    document_masks: bool = False

    def __post_init__(self) -> None:
        if self.windows < self.batch_size:
            raise DataError(
                f"{len(self.tokens)} tokens of text give {self.windows} windows of {self.sequence_length}; "
                f"a batch needs {self.batch_size}: use more text, or a smaller sequence_length or batch_size"
            )

    @property
    def tokens(self) -> np.ndarray:
        """All ids."""
        return self.corpus.ids

    @property
    def windows(self) -> int:
        """Windows in the text; the last one still has a label for each of its tokens."""
        return max(0, len(self.tokens) - 1) // self.sequence_length

    @property
    def fingerprint(self) -> int:
        """32 bits that differ between different texts."""
        return self.corpus.checksum

    def position(self, step: int) -> dict[str, int]:
        """Where training stands before ``step``: small, JSON-able, all that :meth:`resume` needs."""
        return {
            "step": step,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "text": self.fingerprint,
        }

    def resume(self, position: Mapping[str, int]) -> int:
        """The step to go on with, at any number of ranks.

        Raises:
            DataError: the position is one in other batches than these; the message says what differs.
        """
        own = self.position(position.get("step", 0))
        for name, value in own.items():
            if position.get(name) != value:
                found = position.get(name)
                raise DataError(f"the position in the text was taken with {name} {found}; here it is {value}")
        return own["step"]

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
        return self.windows_at(_order(self.seed, epoch, self.windows)[first : first + rows])

    def windows_at(self, indices: np.ndarray) -> Batch:
        """The windows of these numbers, as they follow each other in the text."""
        begin = indices[:, None] * self.sequence_length
        places = begin + np.arange(self.sequence_length + 1)
        ids = self.tokens[places].astype(np.int64)
        documents = np.searchsorted(self.corpus.starts, places, side="right") - 1
        tokens, labels = ids[:, :-1], ids[:, 1:].copy()
        # What follows the end of a document is another document's beginning: nothing to learn there.
        labels[documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
        if not self.document_masks:
            return Batch(tokens, labels)
        starts = np.maximum(self.corpus.starts[documents[:, :-1]], begin)
        return Batch(tokens, labels, places[:, :-1] - starts)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=seed, counter=epoch << 128))
    return generator.permutation(windows)
