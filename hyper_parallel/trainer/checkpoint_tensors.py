"""The tensors of a training checkpoint: those of the model, and the optimizer's moments, cut as their parameters are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Module
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import Learner, TrainingTools
from hyper_parallel.platform.weights import get_weight_backend
from hyper_parallel.tensor_parallel.byte_runs import spec_runs
from hyper_parallel.tensor_parallel.checkpoint_files import Checkpoint, open_checkpoint
from hyper_parallel.tensor_parallel.checkpoint_reader import FileReader
from hyper_parallel.tensor_parallel.model_tensors import ModelTensor, every_rank, model_tensors

__all__ = ["MODEL_FOLDER", "OPTIMIZER_FOLDER", "TrainedParts", "match_moments", "moment_tensors", "read_moments"]

MODEL_FOLDER = "model"
"""In a checkpoint: weights and config, as Hugging Face's libraries load them."""

OPTIMIZER_FOLDER = "optimizer"
"""In a checkpoint: ``<parameter>.exp_avg`` and ``<parameter>.exp_avg_sq``, whole, in the same format."""


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
            dtype = platform.dtype_name(moment)
            found.append(
                ModelTensor((f"{tensor.name}.{kind}",), (), moment, tensor.spec, tensor.rank, tensor.group, dtype)
            )
    if places:
        raise CheckpointError(f"the optimizer holds {len(places)} parameters that are not in the model")
    return found


def match_moments(folder: str, tensors: list[ModelTensor]) -> Checkpoint:
    """The files of the moments, which hold these tensors and no others. Reads headers alone.

    Raises:
        CheckpointError: they do not; the message names the first tensors that do not fit.
    """
    checkpoint = open_checkpoint(folder)
    names = {t.name for t in tensors}
    if missing := sorted(names - checkpoint.tensors.keys()):
        raise CheckpointError(f"{folder} does not have {', '.join(missing[:3])} ({len(missing)} moments are missing)")
    if others := sorted(checkpoint.tensors.keys() - names):
        raise CheckpointError(f"{folder} has moments of parameters that are not trained here: {', '.join(others[:3])}")
    for tensor in tensors:
        entry = checkpoint.tensors[tensor.name].entry
        if entry.shape != tensor.spec.shape or "float" not in entry.dtype:
            raise CheckpointError(
                f"{folder}: {tensor.name} is {entry.dtype} of shape {entry.shape}; expected {tensor.dtype} of shape "
                f"{tensor.spec.shape}"
            )
    return checkpoint


def read_moments(checkpoint: Checkpoint, tensors: list[ModelTensor]) -> None:
    """Read this rank's parts into the optimizer.

    Raises:
        CheckpointError: a file cannot be read to its end; the optimizer must not be used then.
    """
    with FileReader() as reader:
        for tensor in tensors:
            stored = checkpoint.tensors[tensor.name]
            writer, size, dtype = get_weight_backend().writer(tensor.tensor), stored.entry.item_bytes, stored.entry.dtype

            def put(position: int, block: Any, writer: Any = writer, size: int = size, dtype: str = dtype) -> None:
                writer.put(position // size, block, dtype)

            reader.read(stored, spec_runs(tensor.spec, tensor.rank, size), put)
            writer.close()
