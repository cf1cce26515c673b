"""load_hf_checkpoint: from Hugging Face files into a parallelised model, each rank reading its own part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.modules import Module
from hyper_parallel.platform.weights import BufferPlan, get_weight_backend
from hyper_parallel.tensor_parallel.checkpoint_agreement import agree
from hyper_parallel.tensor_parallel.checkpoint_files import Checkpoint, StoredTensor, open_checkpoint
from hyper_parallel.tensor_parallel.checkpoint_match import Match, match_checkpoint
from hyper_parallel.tensor_parallel.checkpoint_reader import FileReader, equal_runs
from hyper_parallel.tensor_parallel.checkpoint_report import LoadReport
from hyper_parallel.tensor_parallel.data_shards import local_part
from hyper_parallel.tensor_parallel.groups import resolve_group
from hyper_parallel.tensor_parallel.model_tensors import (
    ModelTensor,
    common_group,
    every_rank,
    model_tensors,
    whereabouts,
)

__all__ = ["load_hf_checkpoint"]

_WHAT = "load_hf_checkpoint"


def load_hf_checkpoint(
    model: Module,
    path: str | os.PathLike[str],
    *,
    keep: Sequence[str] = (),
    skip: Sequence[str] = (),
    device: str | None = None,
    group: Any = None,
) -> LoadReport:
    """Load weights in Hugging Face's safetensors format into a model that :func:`parallelize_module` has shared.

    First every rank reads the headers and the index, and all agree on one report; only then memory is touched: each
    rank allocates its parts where the model was built without memory, reads exactly their bytes from the files, and
    casts them once to the parameters' dtype. Buffers that are not part of checkpoints are computed. Nothing is
    initialised silently, nothing is unpickled, no file stays mapped.

    Args:
        model: parallelised (or whole, on one rank); on the meta device, or with memory that is overwritten. One that
            FSDP2 has sharded, too, must have memory.
        path: a directory with ``model.safetensors.index.json`` or ``*.safetensors`` files, or one file.
        keep: patterns (``"score.*"``) of names that are not loaded and keep the values they have.
        skip: patterns of keys of the files that are not loaded.
        device: where memory is allocated: ``"cpu"``, ``"cuda"``, ``"npu"``; None: where the model's mesh is.
        group: the ranks that call; None: all of the job.

    Returns:
        What was read by whom, and what was left out (stale files, ignored keys).

    Collectives: two small all-gathers. With data parallelism each replica reads for itself.

    Raises:
        CheckpointError: the same on every rank. Before memory is touched: files that are damaged, missing or lie;
            keys missing, unexpected, or of another shape; ranks that see different files or hold different models.
            After it, when a file cannot be read to its end; the model must not be used then.

    Example:
        >>> with torch.device("meta"):                                                       # doctest: +SKIP
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> parallelize_module(model, mesh["tp"])                                            # doctest: +SKIP
        >>> print(load_hf_checkpoint(model, "Llama-3.2-1B"))                                 # doctest: +SKIP
    """
    ranks = every_rank() if group is None else resolve_group(group)
    device_type, like, error = whereabouts(model, device)
    plan, view = None, [""]
    try:
        if error is not None:
            raise error
        plan = _Plan.make(model, path, keep, skip)
        view = plan.view
        plan.check()
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    agree(error, view, _WHAT, ranks, like)
    assert plan is not None
    read, error = 0, None
    try:
        read = plan.load(device_type)
    except Exception as e:
        error = e
    numbers = agree(error, [""], f"{_WHAT}: reading", ranks, like, [read])
    return plan.report(numbers)


class _Plan:
    """All that is known before memory is touched."""

    def __init__(
        self, checkpoint: Checkpoint, model: Module, tensors: list[ModelTensor], match: Match, buffers: BufferPlan
    ) -> None:
        self.checkpoint, self.model, self.tensors, self.match, self.buffers = checkpoint, model, tensors, match, buffers

    @classmethod
    def make(cls, model: Module, path: str | os.PathLike[str], keep: Sequence[str], skip: Sequence[str]) -> _Plan:
        checkpoint = open_checkpoint(path)
        tensors = model_tensors(model)
        common_group(tensors)
        buffers = get_weight_backend().plan_buffers(model)
        match = match_checkpoint(
            checkpoint,
            tensors,
            model,
            keep=_patterns(keep, "keep"),
            skip=_patterns(skip, "skip"),
            unset_buffers=buffers.unset,
            same_values=_same_values,
        )
        return cls(checkpoint, model, tensors, match, buffers)

    @property
    def view(self) -> list[str]:
        parts = "\n".join(f"{t.names} {t.cut} {t.dtype}" for t in self.tensors)
        return [f"checkpoint {self.checkpoint.digest[:16]}", f"model {hashlib.sha256(parts.encode()).hexdigest()[:16]}"]

    def check(self) -> None:
        problems = self.match.report.problems
        if problems:
            lines = "\n  ".join([*problems, *self.match.report.notes])
            raise CheckpointError(f"checkpoint {self.checkpoint.path} does not fit the model:\n  {lines}")

    def load(self, device_type: str) -> int:
        with FileReader() as reader:
            for tensor, stored in self.match.pairs:
                _load_tensor(reader, tensor, stored, device_type)
        backend = get_weight_backend()
        backend.set_buffers(self.buffers, device_type)
        if unset := backend.without_memory(self.model):
            raise CheckpointError(f"left without values: {', '.join(unset)}")
        return reader.bytes_read

    def report(self, numbers: np.ndarray) -> LoadReport:
        stored = {s.entry.name: s.entry.num_bytes for _, s in self.match.pairs}
        return LoadReport(
            self.match.report,
            len(stored),
            sum(stored.values()),
            self.checkpoint.header_bytes,
            tuple(int(n) for n in numbers[:, 0]),
        )


def _load_tensor(reader: FileReader, tensor: ModelTensor, stored: StoredTensor, device_type: str) -> None:
    backend = get_weight_backend()
    target = tensor.tensor
    if not tensor.has_memory:
        target = backend.allocate(tensor.slots, target, device_type)
    writer = backend.writer(local_part(target))
    size = stored.entry.item_bytes

    def put(position: int, block: np.ndarray) -> None:
        writer.put(position // size, block, stored.entry.dtype)

    reader.read(stored, tensor.runs(size), put)
    writer.close()


def _same_values(first: StoredTensor, second: StoredTensor, tensor: ModelTensor) -> bool:
    if first.entry.shape != tensor.spec.shape:
        return True  # reported as of another shape
    return equal_runs(first, second, tensor.runs(first.entry.item_bytes))


def _patterns(patterns: Sequence[str], name: str) -> Sequence[str]:
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise CheckpointError(f"{name}={patterns!r}: expected a sequence of patterns such as ('score.*',)")
    return patterns
