"""Writing a training checkpoint: all ranks at once, into a folder that gets its name when it is whole."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.checkpoint_agreement import agree, say_so_when_alone
from hyper_parallel.tensor_parallel.checkpoint_files import INDEX_NAME
from hyper_parallel.tensor_parallel.holders import Holders, place_of
from hyper_parallel.tensor_parallel.model_tensors import ModelTensor, model_tensors
from hyper_parallel.tensor_parallel.save_plan import PlannedFile, config_text, index_text, plan_files
from hyper_parallel.tensor_parallel.save_stream import write_files
from hyper_parallel.trainer.checkpoint_folder import (
    flush_folder,
    make_draft,
    prune,
    publish,
    remove_leftovers,
    step_name,
)
from hyper_parallel.trainer.checkpoint_manifest import FileFacts, Manifest, write_text
from hyper_parallel.trainer.checkpoint_state import STATE_FILE, TrainState
from hyper_parallel.trainer.checkpoint_tensors import MODEL_FOLDER, OPTIMIZER_FOLDER, TrainedParts, moment_tensors

__all__ = ["write_checkpoint"]

_WHAT = "writing a checkpoint"
_CONFIG_FILE = "config.json"
_LARGEST_FILE = 5 * 10**9


def write_checkpoint(folder: Path, state: TrainState, parts: TrainedParts, keep: int = 0) -> Path:
    """Write ``folder/step_000123``. Collective over the job.

    Replicas of the model deal out the files among them, and the ranks of a replica deal out theirs again (under FSDP2
    all ranks are one replica); each writes
    its files from the first byte to the last and holds a few blocks of 4 MiB of other ranks' tensors. All is on the
    disk before the folder gets its name by one rename.

    Args:
        folder: of the checkpoints; all ranks see it; made if it is not there.
        state: the same on all ranks, but without random states, which are added here.
        parts: model and optimizer.
        keep: how many checkpoints are left in the folder, with this one; 0: all.

    Returns:
        The checkpoint's folder.

    Collectives: four small all-gathers, one of the random states, and an all-to-all for each 4 MiB.

    Raises:
        CheckpointError: the same on every rank; what was written is removed then.
    """
    ranks, like = parts.ranks(), parts.like()
    writing = _Writing(folder, state, parts, ranks, like)
    with say_so_when_alone(_WHAT, ranks):
        writing.plan()
    try:
        writing.write()
        writing.finish(keep)
    except CheckpointError:
        writing.discard()
        raise
    return folder / step_name(state.step)


class _Writing:
    """One checkpoint being written."""

    def __init__(self, folder: Path, state: TrainState, parts: TrainedParts, ranks: Group, like: Tensor) -> None:
        self._folder, self._state, self._parts, self._ranks, self._like = folder, state, parts, ranks, like
        self._leads = ranks.rank == 0
        self._plans: dict[str, list[PlannedFile]] = {}
        self._tensors: list[ModelTensor] = []
        self._holders = Holders(Group((), None, 0), (), 0, 1)
        self._save_id = ""
        self._draft = folder

    def plan(self) -> None:
        """Which file holds which tensor; the first rank makes the folders."""
        error: Exception | None = None
        view, mark, code, place = [""], secrets.randbits(62), 0, None
        try:
            self._tensors = model_tensors(self._parts.model)
            place = place_of(self._tensors)
            code = place.code(self._ranks)
            moments = moment_tensors(self._parts.model, self._parts.learner)
            for name, tensors in ((MODEL_FOLDER, self._tensors), (OPTIMIZER_FOLDER, moments)):
                self._plans[name] = _deal(tensors, self._ranks.size)
            view = [
                f"{self._folder} {step_name(self._state.step)}",
                *(f"{n}/{f.name}: {t.name} {t.cut}" for n, p in self._plans.items() for f in p for t in f.tensors),
            ]
            if self._leads:
                self._begin(f"{mark:016x}")
        except (OSError, CheckpointError) as e:
            error = _as_checkpoint_error(e, self._folder)
        numbers = self._agree(error, view, "planning", [mark, code])
        self._save_id = f"{int(numbers[0, 0]):016x}"
        self._draft = _draft_path(self._folder, self._state.step, self._save_id)
        assert place is not None
        try:
            self._holders = place.holders(numbers[:, 1].tolist(), self._ranks)
        except CheckpointError:
            self.discard()
            raise

    def _begin(self, save_id: str) -> None:
        final = self._folder / step_name(self._state.step)
        if final.exists():
            raise CheckpointError(f"{final} is there already")
        remove_leftovers(self._folder)
        draft = make_draft(self._folder, self._state.step, save_id)
        for name in self._plans:
            (draft / name).mkdir()

    def write(self) -> None:
        """This rank's share of the tensors' files."""
        error: Exception | None = None
        facts: dict[str, tuple[int, str]] = {}
        try:
            # One call for all: a rank that fails tells the others in it, and none goes on to another one alone.
            everything = [replace(f, name=f"{name}/{f.name}") for name, plan in self._plans.items() for f in plan]
            holders = self._holders
            files = everything[holders.replica :: holders.replicas]
            write_files(files, [self._draft / f.name for f in files], self._save_id, holders, self._like)
            for file in files[holders.group.rank :: holders.group.size]:
                found = FileFacts.of(self._draft / file.name)
                facts[file.name] = (found.bytes, found.sha256)
        except (OSError, CheckpointError) as e:
            error = _as_checkpoint_error(e, self._draft)
        own = {"files": facts, "rng": self._parts.tools.rng_state(self._parts.device_type)}
        told = json.dumps(own).encode()
        lengths = self._agree(error, [""], "tensors", [len(told)])[:, 0].tolist()
        self._told = [json.loads(t) for t in _gather_bytes(told, lengths, self._ranks, self._like)]

    def finish(self, keep: int) -> None:
        """The first rank adds the small files, checks that all is there, and gives the folder its name."""
        error: Exception | None = None
        try:
            if self._leads:
                self._add_small_files()
                publish(self._draft, self._folder, self._state.step)
                if keep:
                    prune(self._folder, keep)
        except (OSError, CheckpointError) as e:
            error = _as_checkpoint_error(e, self._draft)
        self._agree(error, [""], "finishing")

    def _add_small_files(self) -> None:
        files = {name: FileFacts(*facts) for told in self._told for name, facts in told["files"].items()}
        texts = {STATE_FILE: _with_rng(self._state, [told["rng"] for told in self._told])}
        for name, plan in self._plans.items():
            if len(plan) > 1:
                texts[f"{name}/{INDEX_NAME}"] = index_text(plan)
        if config := config_text(self._parts.model, self._tensors):
            texts[f"{MODEL_FOLDER}/{_CONFIG_FILE}"] = config
        for name, text in texts.items():
            write_text(self._draft / name, text)
            files[name] = FileFacts.of(self._draft / name)
        manifest = Manifest(self._state.step, files)
        if missing := [f for n, p in self._plans.items() for f in (f"{n}/{x.name}" for x in p) if f not in files]:
            raise CheckpointError(f"{self._draft}: no rank has written {missing[0]}")
        manifest.check_sizes(self._draft)  # what other ranks have written, seen from here
        for name in self._plans:
            flush_folder(self._draft / name)
        manifest.write(self._draft)

    def discard(self) -> None:
        """Remove what was written; all ranks have stopped writing."""
        if self._leads and self._draft != self._folder:
            shutil.rmtree(self._draft, ignore_errors=True)

    def _agree(self, error: Exception | None, view: Sequence[str], at: str, numbers: Sequence[int] = ()) -> np.ndarray:
        return agree(error, view, f"{_WHAT} ({at})", self._ranks, self._like, numbers)


def _deal(tensors: Sequence[ModelTensor], writers: int) -> list[PlannedFile]:
    """Files of much the same size, about one for each rank."""
    total = sum(file.num_bytes for file in plan_files(tensors, _LARGEST_FILE))
    return plan_files(tensors, max(1, min(_LARGEST_FILE, -(-total // writers))))


def _with_rng(state: TrainState, rng: Sequence[dict[str, str]]) -> str:
    content: dict[str, Any] = {**state.__dict__, "rng": list(rng)}
    return TrainState(**content).encode()


def _draft_path(folder: Path, step: int, save_id: str) -> Path:
    return folder / f".{step_name(step)}.{save_id}.part"


def _as_checkpoint_error(error: Exception, path: Path) -> CheckpointError:
    if isinstance(error, OSError):
        return CheckpointError(f"cannot write {error.filename or path}: {error.strerror}")
    assert isinstance(error, CheckpointError)
    return error


def _gather_bytes(own: bytes, lengths: Sequence[int], group: Group, like: Tensor) -> list[bytes]:
    """Everybody's, on every rank. One all-gather."""
    if group.size == 1:
        return [own]
    platform = get_platform()
    size = -(-max(lengths) // 8) * 8
    padded = np.frombuffer(own.ljust(size, b"\0"), np.int64)
    rows = platform.to_numpy(platform.all_gather(platform.from_numpy(padded, like), group))
    return [row.tobytes()[:length] for row, length in zip(rows, lengths)]
