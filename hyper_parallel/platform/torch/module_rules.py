"""Rules around a module's forward, by giving the module a class of its own, as FSDP2 does.

The new class derives from the old one, so ``isinstance``, hooks, parameter names and the model's own code
stay as they are. Rules get the module as an argument and hold none, so a deep copy of a model is
independent of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.modules import ForwardRule, without_values

__all__ = ["RuledModule", "add_rule", "call_with", "rules_of"]

_RULES = "_tensor_parallel_rules"
_INNER = "_forward_before_rules"
_NAME = "_name_in_the_model"


class RuledModule:
    """Mixed in before the module's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self._parameters.items():  # type: ignore[attr-defined]
            if parameter is not None and parameter.device.type == "meta":
                raise RuntimeError(without_values(_path(self, name), tuple(parameter.shape)))
        call = self.__dict__.get(_INNER) or super().forward  # type: ignore[misc]
        for rule in rules_of(self):  # type: ignore[arg-type]
            call = partial(rule, self, call)
        return call(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        _mark_parameters(self)  # type: ignore[arg-type]
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # FSDP2 puts parameters of its own in the place of the marked ones
        if isinstance(value, nn.Parameter):
            _mark_parameters(self)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _mark_parameters(self)  # type: ignore[arg-type]


def add_rule(module: nn.Module, rule: ForwardRule, name: str = "") -> None:
    """Add ``rule`` outside the rules that are there."""
    if not isinstance(module, RuledModule):
        module.__class__ = _ruled_class(type(module))  # type: ignore[arg-type]
        # a forward that somebody has put on the instance would hide the one of the class
        if (own := module.__dict__.pop("forward", None)) is not None:
            module.__dict__[_INNER] = own
    module.__dict__[_RULES] = (*rules_of(module), rule)
    if name:
        module.__dict__[_NAME] = name
    _mark_parameters(module)


def rules_of(module: nn.Module) -> tuple[ForwardRule, ...]:
    """The rules added so far."""
    rules: tuple[ForwardRule, ...] = module.__dict__.get(_RULES, ())
    return rules


def call_with(
    module: nn.Module,
    forward: Callable[..., Any],
    tensors: Mapping[str, torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run ``forward`` while ``module.<name>`` is another tensor: instance attributes come before
    parameters.
    """
    module.__dict__.update(tensors)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in tensors:
            module.__dict__.pop(name, None)


def _path(module: Any, parameter: str) -> str:
    path = module.__dict__.get(_NAME)
    return f"{path}.{parameter}" if path else f"{parameter} of {type(module).__name__}"


@cache
def _ruled_class(cls: type) -> type:
    return type(f"Parallel{cls.__name__}", (RuledModule, cls), {"__module__": cls.__module__})


def _mark_parameters(module: nn.Module) -> None:
    """Write on each parameter how it is cut; copies and moves make new parameter objects."""
    for rule in rules_of(module):
        for name, spec in rule.cuts.items():
            parameter: Any = module._parameters.get(name)
            if parameter is not None:
                parameter._shard_spec = spec
                parameter._shard_group = rule.group
