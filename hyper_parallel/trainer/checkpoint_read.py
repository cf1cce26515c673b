"""Reading a training checkpoint, at any number of ranks and with any backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.checkpoint_agreement import agree
from hyper_parallel.tensor_parallel.hf_load import load_hf_checkpoint
from hyper_parallel.trainer.checkpoint_manifest import Manifest
from hyper_parallel.trainer.checkpoint_state import STATE_FILE, TrainState
from hyper_parallel.trainer.checkpoint_tensors import MODEL_FOLDER, TrainedParts, match_moments, read_moments

__all__ = ["check_weights", "open_whole_checkpoint", "read_checkpoint"]

_WHAT = "reading a checkpoint"


def read_checkpoint(path: Path, parts: TrainedParts, seed: int) -> TrainState:
    """Fill model, optimizer and random states. Collective over the job.

    The content of every file is compared with its checksum first, each file by one rank. Then every rank reads its own
    parts.

    Args:
        path: the checkpoint's folder; all ranks see it.
        parts: model, with memory, and optimizer.
        seed: of the job. Where another number of ranks, or another backend, goes on, its random numbers begin anew,
            from this seed and the step.

    Collectives: seven small all-gathers.

    Raises:
        CheckpointError: the same on every rank. A file is missing, damaged or of another length (named), or model or
            optimizer are others.
    """
    ranks, like = parts.ranks(), parts.like()
    state, view, error = None, [""], None
    try:
        manifest, state = open_whole_checkpoint(path)
        manifest.check_content(path, sorted(manifest.files)[ranks.rank :: ranks.size])
        view = [f"{path} {manifest.digest}"]
    except CheckpointError as e:
        error = e
    _agree(error, view, "checksums", ranks, like)
    assert state is not None
    load_hf_checkpoint(parts.model, path / MODEL_FOLDER, device=parts.device_type)
    moments, error = None, None
    try:
        moments = match_moments(path, parts.model, parts.learner)
    except CheckpointError as e:
        error = e
    _agree(error, [""], "optimizer", ranks, like)
    assert moments is not None
    error = None
    try:
        read_moments(moments)
        parts.learner.updates = state.updates
        _set_rng(state, parts, ranks, seed, path)
    except CheckpointError as e:
        error = e
    _agree(error, [""], "moments", ranks, like)
    return state


def check_weights(path: Path, ranks: Group, like: Tensor) -> None:
    """Compare the content of the model's files with their checksums, each file by one rank. Collective over ``ranks``.

    Args:
        path: the checkpoint's folder; all ranks see it.
        ranks: those that read it.
        like: a tensor on the device that they communicate from.

    Collectives: one small all-gather.

    Raises:
        CheckpointError: the same on every rank; a file is missing or damaged.
    """
    view, error = [""], None
    try:
        manifest, _ = open_whole_checkpoint(path)
        names = sorted(name for name in manifest.files if name.startswith(f"{MODEL_FOLDER}/"))
        manifest.check_content(path, names[ranks.rank :: ranks.size])
        view = [f"{path} {manifest.digest}"]
    except CheckpointError as e:
        error = e
    _agree(error, view, "checksums", ranks, like)


def open_whole_checkpoint(path: Path) -> tuple[Manifest, TrainState]:
    """What the small files say, once all files are there with their lengths. No collective, reads no tensor.

    Raises:
        CheckpointError: something is missing or damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    manifest = Manifest.read(path)
    manifest.check_sizes(path)
    manifest.check_content(path, [name for name in manifest.files if name == STATE_FILE])
    state = TrainState.read(path)
    if state.step != manifest.step:
        raise CheckpointError(f"{path / STATE_FILE} is of step {state.step}, its manifest of step {manifest.step}")
    return manifest, state


def _set_rng(state: TrainState, parts: TrainedParts, ranks: Group, seed: int, path: Path) -> None:
    if state.backend != get_platform().name or len(state.rng) != ranks.size:
        parts.tools.seed(seed + state.step, parts.device_type)
        return
    try:
        parts.tools.set_rng_state(state.rng[ranks.rank], parts.device_type)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path / STATE_FILE}: {error}") from None


def _agree(error: Exception | None, view: Sequence[str], at: str, ranks: Group, like: Tensor) -> np.ndarray:
    return agree(error, view, f"{_WHAT} ({at})", ranks, like)
