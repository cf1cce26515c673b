"""From a job's options to the text that it trains on."""

from __future__ import annotations

import os
from pathlib import Path

from hyper_parallel.trainer.data import PackedText
from hyper_parallel.trainer.data_cache import open_tokens
from hyper_parallel.trainer.data_tokens import DataError, Tokens
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import SINGLE_PROCESS_FOLDER

__all__ = ["open_text", "pack", "token_cache"]


def token_cache(options: TrainOptions) -> Path:
    """The folder for token ids."""
    return options.output / "tokens" if options.text.cache is None else options.text.cache


def open_text(options: TrainOptions, path: Path | None = None) -> PackedText:
    """The text of a job, or another one (``path``) that is read the same way.

    The process that starts the workers calls this before they do: they find the token ids ready, and it has told what
    is wrong with the text, if anything. The output folder and that of the token ids are no part of it, wherever they
    lie.

    Raises:
        FileNotFoundError: there is no text.
        DataError: the text cannot be used, or is too little, or the model's vocabulary is too small for it.
        OSError: a file cannot be read or written.
    """
    source, output = path or options.data, options.output
    # The second run of a comparison writes into the folder of the first, and must read the same text.
    written = [output.parent] if output.name == SINGLE_PROCESS_FOLDER else [output]
    if source is not None and os.path.realpath(source) in map(os.path.realpath, written):
        raise DataError(f"{source} is the output folder, and what is written there is no text; choose another output")
    return pack(open_tokens(source, options.text, token_cache(options), written), options)


def pack(tokens: Tokens, options: TrainOptions) -> PackedText:
    """Tokens as the batches of a job.

    Raises:
        DataError: as :func:`open_text`.
    """
    size = options.model.vocab_size
    if tokens.highest >= size:
        raise DataError(f"the text has token id {tokens.highest}, but vocab_size is {size}")
    training = options.training
    masks = options.text.document_masks
    return PackedText(tokens, training.sequence_length, training.batch_size, options.seed, masks)
