"""What can be set of the text that a job trains on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["TextOptions"]


@dataclass(frozen=True)
class TextOptions:
    """How files become tokens, and tokens batches."""

    format: Literal["auto", "text", "jsonl"] = "auto"
    """``text``: a file is a document. ``jsonl``: a line is a JSON object with a document in it. ``auto``: ``jsonl``
    for files whose name ends in ``.jsonl`` or ``.ndjson``, else ``text``."""

    field: str = "text"
    """Where the objects of ``jsonl`` files have their text."""

    tokenizer: Path | None = None
    """A ``tokenizer.json`` of Hugging Face's tokenizers, or a folder with one; None: a token is a byte."""

    bos_token: str | None = None
    """Begins each document; None: what the ``tokenizer_config.json`` beside the tokenizer says, if anything."""

    eos_token: str | None = None
    """Ends each document; None: what the ``tokenizer_config.json`` beside the tokenizer says, if anything."""

    document_masks: bool = False
    """Where several documents share a window: tokens see their own document only, and positions start again in each."""

    cache: Path | None = None
    """Folder for the token ids, which are read from the files once; None: ``tokens`` in the output folder."""

    prefetch: int = 2
    """Batches that are made ready beforehand, in a thread; 0: each when it is needed."""

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ValueError(f"prefetch must be at least 0, found {self.prefetch}")
        if not self.field:
            raise ValueError("field must name a field of the JSON objects, found an empty string")
