"""save_hf_checkpoint: from a parallelised model to files that Hugging Face's libraries load."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.modules import Module
from hyper_parallel.tensor_parallel.checkpoint_agreement import agree, say_so_when_alone
from hyper_parallel.tensor_parallel.checkpoint_files import INDEX_NAME
from hyper_parallel.tensor_parallel.groups import resolve_group
from hyper_parallel.tensor_parallel.holders import place_of
from hyper_parallel.tensor_parallel.model_tensors import every_rank, model_tensors, whereabouts
from hyper_parallel.tensor_parallel.save_plan import PlannedFile, config_text, index_text, plan_files
from hyper_parallel.tensor_parallel.save_stream import write_files

__all__ = ["save_hf_checkpoint"]

_WHAT = "save_hf_checkpoint"
_CONFIG_NAME = "config.json"
_UNFINISHED = ".part"


def save_hf_checkpoint(
    model: Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    save_config: bool = True,
    overwrite: bool = False,
    group: Any = None,
) -> tuple[str, ...]:
    """Write a model's weights as Hugging Face safetensors files, whole and unpadded, tied weights once.

    Collective: every rank must call it, with the same arguments. A rank that waits for the others for 10 seconds says
    so in a warning; one that makes another checkpoint call instead makes all raise. (That a rank makes no call at all
    cannot be told from its being slow: the wait ends with the framework's own time-out.)

    The files are dealt out over the ranks of the model and written at the same time; a rank holds its own part and a
    few blocks of 4 MiB of others. All are written under temporary names and flushed to disk before any gets its own
    name, the index comes last: an interrupted save leaves the old checkpoint, or files whose metadata tells that they
    do not belong together (:func:`load_hf_checkpoint` refuses these).

    Args:
        model: parallelised, or whole on one rank. Of data-parallel replicas one writes; what FSDP2 has sharded over
            all ranks that call is put together in the files, and no rank holds the whole.
        path: a directory, which all ranks see; made if it is not there.
        max_shard_bytes: a new file is begun before one gets larger. Several files are written in parallel.
        save_config: write ``config.json`` where the model's config knows its Hugging Face form.
        overwrite: replace a checkpoint that is there.
        group: the ranks that call; None: all of the job.

    Returns:
        The names of the weight files.

    Collectives: four small all-gathers, and an all-to-all for each 4 MiB.

    Raises:
        CheckpointError: the same on every rank; temporary files are removed then.

    Example:
        >>> save_hf_checkpoint(model, "out")         # on every rank                         # doctest: +SKIP
        ('model.safetensors',)
    """
    ranks = every_rank() if group is None else resolve_group(group)
    leads = ranks.rank == 0
    _, like, error = whereabouts(model)
    directory, plan, place, code, view = Path(), None, None, 0, [""]
    try:
        if error is not None:
            raise error
        directory = Path(os.path.abspath(path))
        tensors = model_tensors(model)
        place = place_of(tensors)
        code = place.code(ranks)
        if type(max_shard_bytes) is not int or max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes={max_shard_bytes!r}: expected a positive integer")
        plan = plan_files(tensors, max_shard_bytes)
        view = [str(directory), *(f"{t.names} {t.cut} {t.dtype} in {f.name}" for f in plan for t in f.tensors)]
        if leads:
            _prepare(directory, overwrite)
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    with say_so_when_alone(_WHAT, ranks):
        numbers = agree(error, view, _WHAT, ranks, like, [secrets.randbits(62), code])
    assert plan is not None and place is not None
    holders = place.holders(numbers[:, 1].tolist(), ranks)
    save_id = f"{int(numbers[0, 0]):016x}"
    drafts = [directory / f".{file.name}.{save_id}{_UNFINISHED}" for file in plan]
    try:
        error = None
        try:
            if holders.replica == 0:
                write_files(plan, drafts, save_id, holders, like)
        except Exception as e:
            error = e
        agree(error, [""], f"{_WHAT}: writing", ranks, like)
        error = None
        try:
            if leads:
                texts = {_CONFIG_NAME: config_text(model, tensors)} if save_config else {}
                _finish(directory, plan, drafts, save_id, texts)
        except Exception as e:
            error = e
        agree(error, [""], f"{_WHAT}: finishing", ranks, like)
    except CheckpointError:
        if leads:
            for draft in drafts:
                draft.unlink(missing_ok=True)
        raise
    return tuple(file.name for file in plan)


def _prepare(directory: Path, overwrite: bool) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = _weight_files(directory)
    except OSError as error:
        raise CheckpointError(f"cannot write to {directory}: {error.strerror}") from None
    if found and not overwrite:
        raise CheckpointError(
            f"{directory} already holds {', '.join(found[:3])}; pass overwrite=True to replace the checkpoint"
        )


def _finish(
    directory: Path, plan: Sequence[PlannedFile], drafts: Sequence[Path], save_id: str, texts: dict[str, str | None]
) -> None:
    """Give the files their names, the index last, then remove what they replace."""
    try:
        for file, draft in zip(plan, drafts):
            expected = len(file.header(save_id)) + file.num_bytes
            if not draft.exists() or draft.stat().st_size != expected:
                raise CheckpointError(
                    f"{draft} was written by another rank and is not here, or not whole; {directory} must be on a file "
                    "system that all ranks share"
                )
        before = _weight_files(directory)
        for name, text in texts.items():
            if text is not None:
                _replace_text(directory / name, text, save_id)
        for file, draft in zip(plan, drafts):
            draft.replace(directory / file.name)
        _flush(directory)
        if len(plan) > 1:
            _replace_text(directory / INDEX_NAME, index_text(plan), save_id)
        else:
            (directory / INDEX_NAME).unlink(missing_ok=True)
        new = {file.name for file in plan} | {INDEX_NAME}
        for name in [*before, *_leftovers(directory)]:
            if name not in new:
                (directory / name).unlink(missing_ok=True)
        _flush(directory)
    except OSError as error:
        raise CheckpointError(f"cannot write {error.filename or directory}: {error.strerror}") from None


def _weight_files(directory: Path) -> list[str]:
    """The weights and index that are there, under the names that this function and transformers give them."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name == INDEX_NAME or (path.name.startswith("model") and path.suffix == ".safetensors")
    )


def _leftovers(directory: Path) -> list[str]:
    """What saves that were killed have left."""
    return [p.name for p in directory.iterdir() if p.name.startswith(".model") and p.suffix == _UNFINISHED]


def _replace_text(path: Path, text: str, save_id: str) -> None:
    draft = path.with_name(f".{path.name}.{save_id}{_UNFINISHED}")
    with open(draft, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
