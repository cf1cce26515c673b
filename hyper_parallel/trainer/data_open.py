"""From a job's options to the text that it trains on."""

from __future__ import annotations

import os
from pathlib import Path

from hyper_parallel.trainer.data import PackedText
from hyper_parallel.trainer.data_cache import open_tokens
from hyper_parallel.trainer.data_tokens import DataError, Tokens
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.summary import SINGLE_PROCESS_FOLDER
from hyper_parallel.trainer.worker import speaks_for_job

__all__ = ["open_text", "pack", "token_cache"]

_NAMED = 3


def token_cache(options: TrainOptions) -> Path:
    """The folder for token ids."""
    return options.output / "tokens" if options.text.cache is None else options.text.cache


def open_text(options: TrainOptions, path: Path | None = None) -> PackedText:
    """The text of a job, or another one (``path``) that is read the same way.

    The process that starts the workers calls this before they do: they find the token ids ready, and it has told what
    is wrong with the text, if anything. The output folder and that of the token ids are no part of it, wherever they
    lie, nor are those of other runs, which it names in one line.

    Raises:
        FileNotFoundError: there is no text.
        DataError: the text cannot be used, or is too little, or the model's vocabulary is too small for it.
        OSError: a file cannot be read or written.
    """
    source, output = path or options.data, options.output
    # The second run of a comparison writes into the folder of the first, and must read the same text.
    own = [output.parent] if output.name == SINGLE_PROCESS_FOLDER else [output]
    if source is not None and os.path.realpath(source) in map(os.path.realpath, own):
        raise DataError(f"{source} is the output folder, and what is written there is no text; choose another output")
    written: list[Path] = []
    tokens = open_tokens(source, options.text, token_cache(options), own, written)
    if written and speaks_for_job(os.environ):
        more = f" and {len(written) - _NAMED} more" if len(written) > _NAMED else ""
        named = ", ".join(map(str, written[:_NAMED]))
        print(f"no part of the text of {source}, since commands have written there: {named}{more}", flush=True)
    return pack(tokens, options)


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
