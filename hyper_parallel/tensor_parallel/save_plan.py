"""Which file of a checkpoint holds which tensor, known before anything is written, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.tensor_parallel.byte_runs import uncovered_elements
from hyper_parallel.tensor_parallel.checkpoint_files import SAVE_ID, SINGLE_NAME
from hyper_parallel.tensor_parallel.model_tensors import ModelTensor
from hyper_parallel.tensor_parallel.safetensors_header import DTYPES, encode_header

__all__ = ["PlannedFile", "config_text", "index_text", "item_bytes", "plan_files", "whole_bytes"]

_FORMAT_NAMES = {numpy_name: name for name, (numpy_name, _) in DTYPES.items()}


@dataclass(frozen=True)
class PlannedFile:
    """One file.

    Attributes:
        name: in the checkpoint's directory.
        tensors: in the order of their bytes.
    """

    name: str
    tensors: tuple[ModelTensor, ...]

    def header(self, save_id: str) -> bytes:
        """What stands before the tensors."""
        entries = {t.name: (_FORMAT_NAMES[t.dtype], t.spec.shape) for t in self.tensors}
        return encode_header(entries, {"format": "pt", SAVE_ID: save_id})

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(whole_bytes(t) for t in self.tensors)


def whole_bytes(tensor: ModelTensor) -> int:
    """Bytes of the whole tensor in a file."""
    size = item_bytes(tensor)
    for length in tensor.spec.shape:
        size *= length
    return size


def item_bytes(tensor: ModelTensor) -> int:
    """Bytes of one element."""
    return DTYPES[_FORMAT_NAMES[tensor.dtype]][1]


def plan_files(tensors: Sequence[ModelTensor], max_shard_bytes: int) -> list[PlannedFile]:
    """Fill files up to ``max_shard_bytes``; a larger tensor gets a file of its own. One file has no number.

    Raises:
        CheckpointError: a tensor without values, one of which no rank holds some elements, or one of a dtype that the
            format does not have.
    """
    for tensor in tensors:
        if tensor.dtype not in _FORMAT_NAMES:
            raise CheckpointError(f"{tensor.name} is {tensor.dtype}, which safetensors files cannot hold")
        if count := uncovered_elements(tensor.spec):
            raise CheckpointError(f"{tensor.name}: {count} elements of the whole are on no rank")
        if not tensor.has_memory:
            raise CheckpointError(f"{tensor.name} has no values: the model was built without memory and not filled")
    if not tensors:
        raise CheckpointError("the model has no parameters to save")
    groups: list[list[ModelTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = whole_bytes(tensor)
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) == 1:
        return [PlannedFile(SINGLE_NAME, tuple(groups[0]))]
    count = len(groups)
    return [PlannedFile(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(g)) for i, g in enumerate(groups, 1)]


def index_text(files: Sequence[PlannedFile]) -> str:
    """The content of ``model.safetensors.index.json``."""
    weight_map = {t.name: file.name for file in files for t in file.tensors}
    total = sum(file.num_bytes for file in files)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"


def config_text(model: Module, tensors: Sequence[ModelTensor]) -> str | None:
    """The content of ``config.json``: the model's config as it describes itself, with the dtype that is saved.

    None where the model has no config that knows its Hugging Face form (``to_json_string``, ``to_hf``).
    """
    config = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        content: dict[str, Any] = json.loads(config.to_json_string())  # type: ignore[union-attr]
    elif hasattr(config, "to_hf"):
        content = dict(config.to_hf())  # type: ignore[union-attr]
    else:
        return None
    backend = get_module_backend()
    if not content.get("architectures") and not backend.rules(model):
        content["architectures"] = [backend.describe(model).type_name]
    floats = [t.dtype for t in tensors if "float" in t.dtype]
    for key in ("dtype", "torch_dtype"):
        if key in content and floats:
            content[key] = floats[0]
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
