"""From the many small files of a checkpoint to few large ones: the same bytes, in the same format."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor_parallel.byte_runs import box_runs
from hyper_parallel.tensor_parallel.checkpoint_files import INDEX_NAME, SINGLE_NAME, StoredTensor, open_checkpoint
from hyper_parallel.tensor_parallel.checkpoint_reader import FileReader
from hyper_parallel.tensor_parallel.safetensors_header import DTYPES, encode_header
from hyper_parallel.trainer.checkpoint_folder import flush_folder

__all__ = ["export_folder"]

_CONFIG_FILE = "config.json"
_FORMAT_NAMES = {numpy_name: name for name, (numpy_name, _) in DTYPES.items()}


def export_folder(source: Path, target: Path, max_shard_bytes: int) -> list[str]:
    """Copy all tensors, and the config, into an empty folder. Holds 4 MiB of them at a time.

    Returns:
        The names of the files written.

    Raises:
        CheckpointError: ``source`` is no checkpoint, or has no config.
        OSError: ``target`` cannot be written.
    """
    tensors = list(open_checkpoint(source).tensors.values())
    if not (source / _CONFIG_FILE).is_file():
        raise CheckpointError(f"{source} has no {_CONFIG_FILE}; the model did not know its Hugging Face form")
    groups = _groups(tensors, max_shard_bytes)
    count = len(groups)
    names = [SINGLE_NAME] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for name, group in zip(names, groups):
        _write(target / name, group)
    if count > 1:
        weight_map = {t.entry.name: name for name, group in zip(names, groups) for t in group}
        total = sum(t.entry.num_bytes for t in tensors)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (target / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX_NAME)
    shutil.copyfile(source / _CONFIG_FILE, target / _CONFIG_FILE)
    flush_folder(target)
    return [*names, _CONFIG_FILE]


def _groups(tensors: list[StoredTensor], max_shard_bytes: int) -> list[list[StoredTensor]]:
    """Filled in order; a larger tensor gets a file of its own."""
    groups: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.entry.num_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.entry.num_bytes
    return groups


def _write(path: Path, tensors: list[StoredTensor]) -> None:
    entries = {t.entry.name: (_FORMAT_NAMES[t.entry.dtype], t.entry.shape) for t in tensors}
    with open(path, "xb") as file, FileReader() as reader:

        def append(_: int, block: np.ndarray) -> None:
            file.write(block.data)

        file.write(encode_header(entries, {"format": "pt"}))
        for tensor in tensors:
            shape = tensor.entry.shape
            runs = box_runs(shape, [(0, size) for size in shape], tensor.entry.item_bytes)
            reader.read(tensor, runs, append)
        file.flush()
        os.fsync(file.fileno())
