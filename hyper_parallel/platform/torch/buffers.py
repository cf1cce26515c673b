"""Buffers of a model that was built on the meta device, computed again: rotary frequencies, masks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.platform.torch.init_recorder import record_initialization
from hyper_parallel.platform.torch.module_rules import RuledModule
from hyper_parallel.platform.weights import BufferPlan, Slot

__all__ = ["plan_buffers", "set_buffers", "tensors_beside"]

_KEPT_ARGUMENTS = frozenset({"config", "layer_idx"})
"""Constructor arguments that modules keep unchanged under the same name."""
_ROTARY = frozenset({"inv_freq", "original_inv_freq"})


def plan_buffers(model: nn.Module) -> BufferPlan:
    """Values for buffers on the meta device that are not persistent, and for tensors kept as plain attributes.

    In this order: the module's class is constructed again, where a config is all it takes; ``rope_init_fn`` and the
    config, as rotary embeddings of transformers 4 have them; what ``_init_weights`` copies into them.
    """
    values: list[tuple[Slot, Tensor]] = []
    unset: list[str] = []
    recorded: dict[int, Tensor] | None = None
    for name, module in model.named_modules():
        wanted = _wanted(module)
        if not wanted:
            continue
        found = _rebuilt(module) or _rotary(module)
        if not _fit(found, wanted):
            recorded = record_initialization(model).values if recorded is None else recorded
            found = {own: recorded[id(t)] for own, t in wanted.items() if id(t) in recorded}
        for own, tensor in wanted.items():
            value = found.get(own)
            if value is None or value.shape != tensor.shape:
                unset.append(f"{name}.{own}" if name else own)
            else:
                values.append(((module, own), value.to(tensor.dtype)))
    return BufferPlan(values, tuple(unset))


def set_buffers(plan: BufferPlan, device: torch.device) -> None:
    """Store them."""
    moved: dict[int, Tensor] = {}  # a buffer that is also a plain attribute stays one tensor
    for (module, name), value in plan.values:
        new = moved.setdefault(id(value), value.to(device))
        if name in module._buffers:
            module._buffers[name] = new
        else:
            module.__dict__[name] = new


def tensors_beside(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a module holds as plain attributes."""
    return {k: v for k, v in module.__dict__.items() if isinstance(v, Tensor)}


def _wanted(module: nn.Module) -> dict[str, Tensor]:
    buffers = {k: b for k, b in module._buffers.items() if k in module._non_persistent_buffers_set and b is not None}
    return {k: t for k, t in {**buffers, **tensors_beside(module)}.items() if t.is_meta}


def _fit(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(name in found and found[name].shape == tensor.shape for name, tensor in wanted.items())


def _rebuilt(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a fresh module of the same class; none where its arguments are not known for certain."""
    if next(module.parameters(), None) is not None:
        return {}
    kind = type(module)
    if issubclass(kind, RuledModule):
        kind = kind.__bases__[-1]
    try:
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    arguments = {}
    for parameter in parameters:
        if parameter.name in _KEPT_ARGUMENTS and parameter.name in module.__dict__:
            arguments[parameter.name] = module.__dict__[parameter.name]
        elif parameter.name != "device" or parameter.default is parameter.empty:
            return {}
    return _own_tensors(lambda: kind(**arguments))


def _rotary(module: nn.Module) -> dict[str, Tensor]:
    initialize: Any = getattr(module, "rope_init_fn", None)
    if not callable(initialize) or not hasattr(module, "config"):
        return {}
    try:
        with torch.device("cpu"), torch.no_grad():
            value = initialize(module.config, torch.device("cpu"), **getattr(module, "rope_kwargs", {}))[0]
    except Exception:  # the model's code; what it does not give is reported as unset
        return {}
    return dict.fromkeys(_ROTARY, value)


def _own_tensors(construct: Callable[[], nn.Module]) -> dict[str, Tensor]:
    try:
        with torch.device("cpu"), torch.no_grad():
            fresh = construct()
    except Exception:  # the model's code; what it does not give is reported as unset
        return {}
    return {k: b for k, b in {**fresh._buffers, **tensors_beside(fresh)}.items() if b is not None}
