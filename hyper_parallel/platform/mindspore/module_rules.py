"""Rules around a cell's construct, by giving the cell a class of its own.

The new class derives from the old one, so ``isinstance``, hooks, parameter names and the model's own code stay as they
are. Rules get the cell as an argument and hold none, so a deep copy of a model is independent of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.platform.mindspore._bytecode_capture import pause_capture, resume_capture
from hyper_parallel.platform.mindspore._graph_capture import asked, refuse_in_trace
from hyper_parallel.platform.modules import ForwardRule

__all__ = ["RuledModule", "add_rule", "call_with", "recomputes", "rules_of"]

_RULES = "_tensor_parallel_rules"
_INNER = "_construct_before_rules"


class RuledModule:
    """Mixed in before the cell's own class. PyNative mode only: rules are Python that a compiler cannot take in."""

    @property
    def _fields(self) -> Any:
        asked(self)  # by a compiler, which then is refused
        raise AttributeError("_fields")

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        captured = pause_capture()
        try:
            return _run(self, self.__dict__.get(_INNER) or super().construct, args, kwargs)  # type: ignore[misc]
        finally:
            if captured:
                resume_capture()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        _mark_parameters(self)  # type: ignore[arg-type]
        return result

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _mark_parameters(self)  # type: ignore[arg-type]


def _run(module: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    refuse_in_trace("a layer that is shared between ranks is called")
    for rule in rules_of(module):
        call = partial(rule, module, call)
    return call(*args, **kwargs)


def add_rule(module: nn.Cell, rule: ForwardRule) -> None:
    """Add ``rule`` outside the rules that are there.

    Raises:
        ValueError: the cell has got ``recompute()``, which holds the construct of before.
    """
    if recomputes(module):
        raise ValueError(
            f"{type(module).__name__} was given recompute() before a rule; call recompute() after parallelize_module"
        )
    if not isinstance(module, RuledModule):
        module.__class__ = _ruled_class(type(module))  # type: ignore[assignment, arg-type]
        # a construct that somebody has put on the instance would hide the one of the class
        if (own := module.__dict__.pop("construct", None)) is not None:
            module.__dict__[_INNER] = own
    module.__dict__[_RULES] = (*rules_of(module), rule)
    _mark_parameters(module)


def rules_of(module: nn.Cell) -> tuple[ForwardRule, ...]:
    """The rules added so far."""
    rules: tuple[ForwardRule, ...] = module.__dict__.get(_RULES, ())
    return rules


def recomputes(module: nn.Cell) -> bool:
    """Whether ``recompute()`` was called on the cell itself: it then runs the construct that it found at the time."""
    return getattr(module, "_recompute_cell", None) is not None


def call_with(
    module: nn.Cell,
    forward: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run ``forward`` while ``module.<name>`` is another tensor: instance attributes come before parameters."""
    module.__dict__.update(tensors)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in tensors:
            module.__dict__.pop(name, None)


@cache
def _ruled_class(cls: type) -> type:
    return type(f"Parallel{cls.__name__}", (RuledModule, cls), {"__module__": cls.__module__})


def _mark_parameters(module: nn.Cell) -> None:
    """Write on each parameter how it is cut; copies are new parameter objects."""
    for rule in rules_of(module):
        for name, spec in rule.cuts.items():
            parameter: Any = module._params.get(name)
            if parameter is not None:
                parameter._shard_spec = spec
                parameter._shard_group = rule.group
