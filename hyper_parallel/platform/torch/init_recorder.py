"""What a model's own initialisation does, found by running it on tensors without memory.

The distributions a model starts from are written in its code (``_init_weights`` of transformers' models,
``reset_parameters`` of ``torch.nn``), in terms of whole parameters. For the recording every parameter is replaced by
one of its whole shape on the meta device, so nothing is allocated and nothing random is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.platform.weights import Draw

__all__ = ["Recording", "record_initialization"]

_SHARED_LAYER_INITIALIZERS = "_initializers"


@dataclass
class Recording:
    """What happened to each parameter and buffer, by its ``id``.

    Attributes:
        draws: how a parameter is drawn; in words, where it is more than one draw.
        values: the value that was copied into a buffer.
    """

    draws: dict[int, Draw | str] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


def record_initialization(model: nn.Module) -> Recording:
    """Run the model's own initialisation of what has no memory yet; the model is as before afterwards."""
    owners = _initializing_parents(model)
    wanted = [m for m in reversed(list(model.modules())) if _concerned(m, owners)]  # children before parents
    with _whole_and_without_memory(model) as originals, torch.no_grad(), torch.device("cpu"):
        recorder = _Recorder(originals)
        for module in wanted:
            initialize = _initializer_of(module, owners)
            if initialize is None:
                continue
            try:
                with recorder:
                    initialize()
            except Exception as error:  # the model's code: whatever it raises, the rest can still be recorded
                recorder.refuse(module, f"{type(error).__name__}: {error}")
    return recorder.recording


class _Recorder(TorchDispatchMode):
    """Notes the operators that change one of the replaced tensors."""

    def __init__(self, originals: dict[int, tuple[int, Tensor]]) -> None:
        super().__init__()
        self._originals = originals
        self.recording = Recording()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            found = self._originals.get(_storage(args[0]))
            if found is not None:
                self._note(found[0], found[1], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def refuse(self, module: nn.Module, reason: str) -> None:
        for tensor in module._parameters.values():
            if tensor is not None and (found := self._originals.get(_storage(tensor))) is not None:
                self.recording.draws[found[0]] = reason

    def _note(self, key: int, whole: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        target: Tensor = args[0]
        draws = self.recording.draws
        if name == "copy_" and args[1].device.type != "meta":
            self.recording.values[key] = args[1].detach().clone()
            draws[key] = "it is copied from another tensor"
        elif target.shape == whole.shape and target.stride() == whole.stride():
            draws[key] = _draw(name, args[1:], kwargs) or f"it is initialised by {name}"
        elif _is_zero(name, args[1:]) and (rows := _rows(target, whole)) is not None:
            before = draws.get(key)
            if isinstance(before, Draw):
                draws[key] = replace(before, zero_rows=tuple(sorted({*before.zero_rows, *rows})))
        else:
            draws[key] = f"a part of it is initialised by {name}"


def _draw(name: str, args: Any, kwargs: Any) -> Draw | None:
    if name == "normal_":
        return Draw("normal", (_number(args, kwargs, 0, "mean", 0.0), _number(args, kwargs, 1, "std", 1.0)))
    if name == "uniform_":
        return Draw("uniform", (_number(args, kwargs, 0, "from", 0.0), _number(args, kwargs, 1, "to", 1.0)))
    if name == "zero_":
        return Draw("constant", (0.0,))
    if name == "fill_" and not isinstance(args[0], Tensor):
        return Draw("constant", (float(args[0]),))
    return None


def _number(args: Any, kwargs: Any, index: int, name: str, default: float) -> float:
    return float(args[index] if len(args) > index else kwargs.get(name, default))


def _is_zero(name: str, args: Any) -> bool:
    return name == "zero_" or (name == "fill_" and not isinstance(args[0], Tensor) and args[0] == 0)


def _rows(part: Tensor, whole: Tensor) -> list[int] | None:
    """The indices of dim 0 that a view of a contiguous tensor covers, if it covers whole ones."""
    row = whole[0].numel() if whole.dim() and len(whole) else 0
    if not row or part.numel() % row or not part.is_contiguous() or part.storage_offset() % row:
        return None
    first = part.storage_offset() // row
    return list(range(first, first + part.numel() // row))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _concerned(module: nn.Module, owners: dict[int, nn.Module]) -> bool:
    """Whether its initialisation changes something without memory; transformers' reaches into children."""
    inside = module.modules() if id(module) in owners else [module]
    return any(t is not None and t.is_meta for m in inside for t in (*m._parameters.values(), *m._buffers.values()))


def _initializing_parents(model: nn.Module) -> dict[int, nn.Module]:
    """For each module the nearest one above it, or itself, that initialises what it holds, as transformers do it."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module, parent: nn.Module | None) -> None:
        parent = module if callable(getattr(module, "_init_weights", None)) else parent
        if parent is not None:
            found[id(module)] = parent
        for child in module.children():
            visit(child, parent)

    visit(model, None)
    return found


def _initializer_of(module: nn.Module, owners: dict[int, nn.Module]) -> Any:
    if hasattr(module, _SHARED_LAYER_INITIALIZERS):  # the library's own layers know their distributions
        return None
    if id(module) in owners:
        parent: Any = owners[id(module)]
        return lambda: parent._init_weights(module)
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return own if callable(own) else None


@contextmanager
def _whole_and_without_memory(model: nn.Module) -> Iterator[dict[int, tuple[int, Tensor]]]:
    """Replace every parameter and buffer; yields storage -> (``id`` of the original, its stand-in)."""
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    saved = [(table, dict(table)) for table in tables]
    stand_ins: dict[int, Tensor] = {}
    originals: dict[int, tuple[int, Tensor]] = {}
    for _, before in saved:
        for tensor in before.values():
            if tensor is None or id(tensor) in stand_ins:
                continue
            spec = getattr(tensor, "_shard_spec", None)
            shape = tuple(tensor.shape) if spec is None else spec.shape
            new: Tensor = torch.empty(shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            stand_ins[id(tensor)] = new
            if tensor.is_meta:
                originals[_storage(new)] = (id(tensor), new)
    try:
        for table, before in saved:
            table.update({name: stand_ins[id(t)] for name, t in before.items() if t is not None})
        yield originals
    finally:
        for table, before in saved:
            table.clear()
            table.update(before)
