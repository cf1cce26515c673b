"""Rules that leave a module's arithmetic alone: they move activations before and after it, and sum gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Placement, Replicate
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.activations import deliver, stays_local, take_apart
from hyper_parallel.tensor_parallel.regions import copy_to_tp_region
from hyper_parallel.tensor_parallel.rules import Rule

__all__ = ["ActivationRule", "Move", "SummedRule", "WholeRule"]

_opaque = get_platform().opaque


@dataclass(frozen=True)
class Move:
    """From how a plain value lies to how it shall lie; None: left alone."""

    given: tuple[Placement | None, ...]
    wanted: tuple[Placement | None, ...]
    use_local: bool

    def __call__(self, values: Sequence[Any], mesh: DeviceMesh, where: str, what: str) -> list[Any]:
        if len(values) != len(self.given):
            raise ValueError(f"{where}: found {len(values)} {what}, but the plan gives layouts for {len(self.given)}")
        return [
            move_one(x, mesh, given, wanted, self.use_local, where)
            for x, given, wanted in zip(values, self.given, self.wanted)
        ]


def move_one(
    x: Any, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None, use_local: bool, where: str
) -> Any:
    """One value; without a placement it is left alone.

    Raises:
        TypeError: a placement for something that is no tensor.
    """
    if given is None or wanted is None or x is None:
        return x
    if not get_platform().is_tensor(x):
        raise TypeError(f"{where}: the plan gives {given} -> {wanted} for a {type(x).__name__}; expected a tensor")
    if use_local and stays_local(x, given, wanted, where):
        return x
    local, layout = take_apart(x, mesh, given, where=where)
    return deliver(local, layout, wanted, use_local, where, "activation")


@dataclass(frozen=True, eq=False, kw_only=True)
class ActivationRule(Rule):
    """Moves arguments before the module's forward and results after it."""

    inputs: Move | None = None
    named_inputs: Mapping[str, tuple[Placement | None, Placement | None]] = field(default_factory=dict)
    named_use_local: bool = False
    outputs: Move | None = None

    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        where = self.place(module)
        if self.inputs is not None:
            args = tuple(self.inputs(args, self.mesh, where, "positional inputs"))
        for name, (given, wanted) in self.named_inputs.items():
            if name in kwargs:
                kwargs[name] = move_one(kwargs[name], self.mesh, given, wanted, self.named_use_local, where)
        result = forward(*args, **kwargs)
        if self.outputs is None:
            return result
        if isinstance(result, tuple):
            return tuple(self.outputs(result, self.mesh, where, "outputs"))
        return self.outputs([result], self.mesh, where, "outputs")[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class SummedRule(Rule):
    """A module whose parameters are whole while its activations are not: its parameters' gradients are
    summed.
    """

    move: bool = False

    @_opaque
    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        backend = get_module_backend()
        parameters = backend.own_parameters(module)
        summed = {name: copy_to_tp_region(p, self.group) for name, p in parameters.items()}
        layout, where = None, self.place(module)
        moves = self.move and bool(args)
        if moves and not (self.use_local and stays_local(args[0], self.input, self.input, where)):
            local, layout = take_apart(args[0], self.mesh, self.input, where=where)
            args = (deliver(local, layout, self.input, use_local=True, where=where, what="activation"), *args[1:])
        if moves and 0 in get_platform().shape(args[0]):
            result = _of_nothing(args[0], summed.values())
        else:
            result = backend.call_with(module, forward, summed, args, kwargs)
        if layout is None or self.use_local:
            return result
        return deliver(result, layout.replace([self.input]), self.input, use_local=False, where=where)


def _of_nothing(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """What a norm makes of ``x``, which has no elements: itself, on the graph of the parameters, which the other ranks
    sum gradients of. MindSpore's kernels refuse to run, and leave sums of nothing uninitialised.
    """
    platform = get_platform()
    empty = platform.shape(x)

    def made_of(parameter: Tensor) -> Tensor:
        whole = platform.shape(parameter)
        return platform.linear_map(
            parameter, lambda p: platform.zeros(empty, p), lambda grad: platform.zeros(whole, grad)
        )

    for parameter in parameters:
        x = x + made_of(parameter)
    return x


@dataclass(frozen=True, eq=False, kw_only=True)
class WholeRule(Rule):
    """The first input whole on every rank; a single output brought to its placement."""

    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        where = self.place(module)
        args = tuple(
            move_one(x, self.mesh, self.input, Replicate(), True, where) if i == 0 else x for i, x in enumerate(args)
        )
        result = forward(*args, **kwargs)
        if isinstance(result, tuple):
            first = move_one(result[0], self.mesh, Replicate(), self.output, self.use_local, where)
            return (first, *result[1:])
        return move_one(result, self.mesh, Replicate(), self.output, self.use_local, where)
