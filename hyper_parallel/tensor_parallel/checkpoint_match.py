"""Which tensor of a checkpoint belongs to which of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hyper_parallel.platform.modules import Module
from hyper_parallel.tensor_parallel.byte_runs import uncovered_elements
from hyper_parallel.tensor_parallel.checkpoint_files import Checkpoint, StoredTensor
from hyper_parallel.tensor_parallel.checkpoint_report import CheckpointReport
from hyper_parallel.tensor_parallel.model_tensors import ModelTensor, local_buffer_names

__all__ = ["Match", "match_checkpoint"]

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_OLD_BUFFERS = ("*rotary_emb.inv_freq",)
"""Keys of old checkpoints that models compute themselves today."""

SameValues = Callable[[StoredTensor, StoredTensor, ModelTensor], bool]
"""Whether two stored tensors hold the same of what this rank needs."""


@dataclass(frozen=True)
class Match:
    """Pairs to load, and what does not fit."""

    pairs: tuple[tuple[ModelTensor, StoredTensor], ...]
    report: CheckpointReport


def match_checkpoint(
    checkpoint: Checkpoint,
    tensors: Sequence[ModelTensor],
    model: Module,
    *,
    keep: Sequence[str],
    skip: Sequence[str],
    unset_buffers: Sequence[str],
    same_values: SameValues,
) -> Match:
    """Match by name; a base model's prefix (``model.``, ``transformer.``) may be there on one side only.

    Args:
        checkpoint: what the headers say.
        tensors: those of the model.
        model: for its base model's name, and the keys that it says to ignore.
        keep: patterns of names that are not loaded and keep their values.
        skip: patterns of keys that are not loaded.
        unset_buffers: buffers that nobody can compute.
        same_values: asked when two keys mean one parameter.
    """
    names = {name for t in tensors for name in t.names}
    ignores = _ignores(model, skip)
    keys: dict[str, StoredTensor] = {}
    unexpected: list[str] = []
    ignored: list[str] = []
    duplicated = [f"{key} (also in {file})" for key, file in checkpoint.duplicated]
    for key, stored in checkpoint.tensors.items():
        name = _name_of(key, names, model)
        if _any(skip, key):
            ignored.append(key)
        elif name is None:
            (ignored if ignores(key) else unexpected).append(key)
        elif name in keys:
            unexpected.append(f"{key} (means {name}, as {keys[name].entry.name} does)")
        else:
            keys[name] = stored
    pairs: list[tuple[ModelTensor, StoredTensor]] = []
    missing: list[str] = []
    kept: list[str] = []
    conflicting: list[str] = []
    unset = list(unset_buffers)
    for tensor in tensors:
        found = [keys[name] for name in tensor.names if name in keys]
        if any(_any(keep, name) for name in tensor.names):
            kept.append(tensor.name)
            ignored += [stored.entry.name for stored in found]
            if not tensor.has_memory:
                unset.append(f"{tensor.name} (to be kept, but the model was built without memory)")
        elif not found:
            missing.append(_missing(tensor, model))
        else:
            pairs.append((tensor, found[0]))
            for other in found[1:]:
                text = f"{other.entry.name} (one parameter with {found[0].entry.name})"
                (duplicated if same_values(found[0], other, tensor) else conflicting).append(text)
    report = CheckpointReport(
        str(checkpoint.path),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        mis_shaped=tuple(
            (t.name, s.entry.shape, t.spec.shape) for t, s in pairs if s.entry.shape != t.spec.shape
        ),
        mis_typed=tuple((t.name, s.entry.dtype, t.dtype) for t, s in pairs if not _castable(s.entry.dtype, t.dtype)),
        conflicting=tuple(conflicting),
        uncovered=tuple((t.name, count) for t, _ in pairs if (count := uncovered_elements(t.spec))),
        unset=tuple(unset),
        stale=checkpoint.stale,
        duplicated=tuple(duplicated),
        ignored=tuple(ignored),
        kept=tuple(kept),
    )
    return Match(tuple(pairs), report)


def _name_of(key: str, names: Collection[str], model: Module) -> str | None:
    prefix = getattr(model, "base_model_prefix", "")
    candidates = [key]
    if isinstance(prefix, str) and prefix:
        candidates += [f"{prefix}.{key}", key.removeprefix(f"{prefix}.")]
    return next((name for name in candidates if name in names), None)


def _missing(tensor: ModelTensor, model: Module) -> str:
    text = " (tied to ".join(tensor.names) + ")" * (len(tensor.names) - 1)
    config = getattr(model, "config", None)
    is_table = tensor.spec.shape[:1] == (getattr(config, "vocab_size", None),)
    if len(tensor.names) == 1 and is_table and getattr(config, "tie_word_embeddings", False):
        text += " (the config ties it to the embedding, but this model holds two parameters: tie them first)"
    return text


def _ignores(model: Module, skip: Sequence[str]) -> Callable[[str], bool]:
    """Keys without a place in the model that nobody misses."""
    computed = local_buffer_names(model)
    said = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(p) for p in said if isinstance(p, str)]

    def ignores(key: str) -> bool:
        return (
            _name_of(key, computed, model) is not None
            or _any(_OLD_BUFFERS, key)
            or any(p.search(key) for p in patterns)
        )

    return ignores


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _castable(found: str, wanted: str) -> bool:
    return found == wanted or (found in _FLOATS and wanted in _FLOATS)
