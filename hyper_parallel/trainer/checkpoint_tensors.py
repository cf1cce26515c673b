"""The tensors of a training checkpoint: those of the model, and the optimizer's moments, cut as these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Module
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import Learner, TrainingTools
from hyper_parallel.platform.weights import get_weight_backend
from hyper_parallel.tensor_parallel.checkpoint_files import StoredTensor, open_checkpoint
from hyper_parallel.tensor_parallel.checkpoint_reader import FileReader
from hyper_parallel.tensor_parallel.data_shards import local_part
from hyper_parallel.tensor_parallel.model_tensors import ModelTensor, every_rank, model_tensors

__all__ = ["MODEL_FOLDER", "OPTIMIZER_FOLDER", "TrainedParts", "match_moments", "moment_tensors", "read_moments"]

MODEL_FOLDER = "model"
"""In a checkpoint: weights and config, as Hugging Face's libraries load them."""

OPTIMIZER_FOLDER = "optimizer"
"""In a checkpoint: ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq``, whole, in the same format."""

_WIDE = "float32"
"""Beside the moments, where a model computes in fewer bits: what its parameters are rounded from."""


@dataclass(frozen=True)
class TrainedParts:
    """What of a job goes into a checkpoint, and what comes back from one.

    Attributes:
        model: the backend's module.
        learner: has the optimizer.
        tools: the backend's.
        device_type: where the job is.
    """

    model: Module
    learner: Learner
    tools: TrainingTools
    device_type: str

    def ranks(self) -> Group:
        """All of the job."""
        return every_rank()

    def like(self) -> Tensor:
        """A tensor on the device that the ranks communicate from."""
        return get_weight_backend().empty_on(self.device_type)


def moment_tensors(model: Module, learner: Learner) -> list[ModelTensor]:
    """The moments of all trained parameters, in the order of the model.

    Raises:
        CheckpointError: the optimizer holds a parameter that the model has not.
    """
    platform = get_platform()
    places = {id(p): index for index, p in enumerate(learner.parameters)}
    moments = learner.moments()
    found = []
    for tensor in model_tensors(model):
        index = places.pop(id(tensor.tensor), None)
        if index is None:
            continue
        for kind, values in moments.items():
            moment: Any = values[index]
            name, dtype = f"{tensor.name}.{kind}", platform.dtype_name(moment)
            found.append(replace(tensor, names=(name,), slots=(), tensor=moment, dtype=dtype))
    if places:
        raise CheckpointError(f"the optimizer holds {len(places)} parameters that are not in the model")
    return found


def match_moments(path: Path, model: Module, learner: Learner) -> list[tuple[ModelTensor, StoredTensor]]:
    """What of a checkpoint's folder belongs where. Reads headers alone.

    Where only one of the two jobs keeps wider weights than it computes with (``float32``), these are read into the
    parameters, or the stored weights into them.

    Raises:
        CheckpointError: the moments are of other parameters; the message names the first that do not fit.
    """
    folder = path / OPTIMIZER_FOLDER
    stored = dict(open_checkpoint(folder).tensors)
    wanted = {t.name: t for t in moment_tensors(model, learner)}
    weights = open_checkpoint(path / MODEL_FOLDER).tensors
    for tensor in model_tensors(model):
        name = f"{tensor.name}.{_WIDE}"
        if name in stored and name not in wanted:
            wanted[name] = replace(tensor, names=(name,))
        if name in wanted and name not in stored and tensor.name in weights:
            stored[name] = weights[tensor.name]
    if missing := sorted(wanted.keys() - stored.keys()):
        raise CheckpointError(f"{folder} does not have {', '.join(missing[:3])} ({len(missing)} moments are missing)")
    if others := sorted(stored.keys() - wanted.keys()):
        raise CheckpointError(f"{folder} has moments of parameters that are not trained here: {', '.join(others[:3])}")
    for name, tensor in wanted.items():
        entry = stored[name].entry
        if entry.shape != tensor.spec.shape or "float" not in entry.dtype:
            raise CheckpointError(
                f"{folder}: {name} is {entry.dtype} of shape {entry.shape}; expected {tensor.dtype} of shape "
                f"{tensor.spec.shape}"
            )
    return [(tensor, stored[name]) for name, tensor in wanted.items()]


def read_moments(pairs: Sequence[tuple[ModelTensor, StoredTensor]]) -> None:
    """Read this rank's parts into the optimizer.

    Raises:
        CheckpointError: a file cannot be read to its end; the optimizer must not be used then.
    """
    with FileReader() as reader:
        for tensor, stored in pairs:
            _read(reader, tensor, stored)


def _read(reader: FileReader, tensor: ModelTensor, stored: StoredTensor) -> None:
    writer, entry = get_weight_backend().writer(local_part(tensor.tensor)), stored.entry

    def put(position: int, block: Any) -> None:
        writer.put(position // entry.item_bytes, block, entry.dtype)

    reader.read(stored, tensor.runs(entry.item_bytes), put)
    writer.close()
