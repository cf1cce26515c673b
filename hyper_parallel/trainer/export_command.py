"""``hyper-parallel export``: the weights of a checkpoint of training as a Hugging Face folder. Loads no framework."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from hyper_parallel.errors import CheckpointError
from hyper_parallel.trainer.byte_tokenizer_files import write_byte_tokenizer
from hyper_parallel.trainer.checkpoint_folder import Place
from hyper_parallel.trainer.checkpoint_options import CheckpointOptions
from hyper_parallel.trainer.checkpoint_read import open_whole_checkpoint
from hyper_parallel.trainer.checkpoint_tensors import MODEL_FOLDER
from hyper_parallel.trainer.export_files import export_folder

__all__ = ["ExportOptions", "export", "run"]

_TOKENIZER = "tokenizer.json"
_BESIDE_IT = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class ExportOptions:
    """Write the weights of a checkpoint of training as a folder that Hugging Face's libraries load."""

    source: tyro.conf.Positional[Path]
    """A checkpoint, or the folder of a run, whose last one is taken."""

    target: tyro.conf.Positional[Path]
    """A folder that is not there yet, or an empty one."""

    folder: str = CheckpointOptions().folder
    """Where a run keeps its checkpoints, in its folder."""

    max_shard_bytes: int = 5 * 10**9
    """A new file is begun before one gets larger."""

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1, found {self.max_shard_bytes}")


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = tyro.cli(ExportOptions, args=list(arguments), prog="hyper-parallel export")
    try:
        written = export(options)
    except CheckpointError as error:
        print(f"hyper-parallel export: {error}", file=sys.stderr)
        return 1
    print(f"written: {', '.join(str(options.target / name) for name in written)}")
    return 0


def export(options: ExportOptions) -> list[str]:
    """Check every file that is read against its checksum, and write the folder; it gets its name when it is whole.

    Returns:
        The names of the files in it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the target is in use or cannot be written.
    """
    checkpoint = Place(options.source, options.folder).locate()
    manifest, state = open_whole_checkpoint(checkpoint)
    manifest.check_content(checkpoint, [name for name in manifest.files if name.startswith(f"{MODEL_FOLDER}/")])
    target = Path(os.path.abspath(options.target))
    draft = target.with_name(f".{target.name}.part")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{target} is there already; expected a new or an empty folder")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        written = export_folder(checkpoint / MODEL_FOLDER, draft, options.max_shard_bytes)
        written += _write_tokenizer(state.options, draft)
        draft.replace(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {error.filename or draft}: {error.strerror}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return written


def _write_tokenizer(options: object, target: Path) -> list[str]:
    """Copy the file of the tokenizer that the run has named, and those beside it, under the names that Hugging Face's
    libraries look for, or write that of bytes; nothing where a named one is gone. Returns the files' names.
    """
    text = options.get("text") if isinstance(options, dict) else None
    if not isinstance(text, dict):
        return []
    named = text.get("tokenizer")
    if named is None:
        return write_byte_tokenizer(target)
    file = Path(named) / _TOKENIZER if Path(named).is_dir() else Path(named)
    if not file.is_file():
        print(f"the tokenizer of the run, {file}, is gone: none is written", file=sys.stderr)
        return []
    found = {_TOKENIZER: file, **{name: file.with_name(name) for name in _BESIDE_IT}}
    found = {name: path for name, path in found.items() if path.is_file()}
    for name, path in found.items():
        shutil.copyfile(path, target / name)
    return list(found)
