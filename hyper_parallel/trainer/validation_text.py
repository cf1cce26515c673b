"""The two texts of a job: what it trains on, and what it is validated on."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.trainer.data import PackedText
from hyper_parallel.trainer.data_open import open_text
from hyper_parallel.trainer.data_tokens import DataError
from hyper_parallel.trainer.options import TrainOptions

__all__ = ["open_texts"]


def open_texts(options: TrainOptions) -> tuple[PackedText, PackedText | None]:
    """Text to train on and text to validate on; None without validation.

    Raises:
        FileNotFoundError: there is no text.
        DataError: a text cannot be used, or is too little.
        OSError: a file cannot be read or written.
    """
    text = open_text(options)
    validation = options.validation
    if not validation.freq:
        return text, None
    try:
        if validation.data is not None:
            return text, open_text(options, validation.data)
        count = len(text.corpus.ids)
        cut = count - int(count * validation.held_out)
        held_out = replace(text, corpus=text.corpus.part(cut, count))
    except DataError as error:
        raise DataError(f"text for validation: {error}") from None
    return replace(text, corpus=text.corpus.part(0, cut)), held_out
