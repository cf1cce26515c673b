"""Styles that leave a module's arithmetic alone: inputs and outputs brought to a placement, norms on a
sharded sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.activations import deliver, take_apart
from hyper_parallel.tensor_parallel.regions import copy_to_tp_region
from hyper_parallel.tensor_parallel.rules import Rule
from hyper_parallel.tensor_parallel.styles import ParallelStyle, Site

__all__ = [
    "NoParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "SequenceParallel",
    "SummedGradients",
]

_opaque = get_platform().opaque

Layouts = Placement | Sequence[Placement | None] | None


@dataclass(frozen=True)
class _Move:
    """From how a plain value lies to how it shall lie; None: left alone."""

    given: tuple[Placement | None, ...]
    wanted: tuple[Placement | None, ...]
    use_local: bool

    def __call__(self, values: Sequence[Any], mesh: DeviceMesh, what: str) -> list[Any]:
        if len(values) != len(self.given):
            raise ValueError(f"{what}: found {len(values)}, but the plan gives layouts for {len(self.given)}")
        return [
            move_one(x, mesh, given, wanted, self.use_local)
            for x, given, wanted in zip(values, self.given, self.wanted)
        ]


def move_one(
    x: Any, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None, use_local: bool
) -> Any:
    """One value; without a placement it is left alone.

    Raises:
        TypeError: a placement for something that is no tensor.
    """
    if given is None or wanted is None or x is None:
        return x
    if not get_platform().is_tensor(x):
        raise TypeError(f"the plan gives {given} -> {wanted} for a {type(x).__name__}; expected a tensor")
    local, layout = take_apart(x, mesh, given)
    return deliver(local, layout, wanted, use_local)


@dataclass(frozen=True, eq=False, kw_only=True)
class ActivationRule(Rule):
    """Moves arguments before the module's forward and results after it."""

    inputs: _Move | None = None
    named_inputs: Mapping[str, tuple[Placement | None, Placement | None]] = field(default_factory=dict)
    named_use_local: bool = False
    outputs: _Move | None = None

    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.inputs is not None:
            args = tuple(self.inputs(args, self.mesh, "positional inputs"))
        for name, (given, wanted) in self.named_inputs.items():
            if name in kwargs:
                kwargs[name] = move_one(kwargs[name], self.mesh, given, wanted, self.named_use_local)
        result = forward(*args, **kwargs)
        if self.outputs is None:
            return result
        if isinstance(result, tuple):
            return tuple(self.outputs(result, self.mesh, "outputs"))
        return self.outputs([result], self.mesh, "outputs")[0]


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
        layout = None
        if self.move and args:
            local, layout = take_apart(args[0], self.mesh, self.input)
            args = (deliver(local, layout, self.input, use_local=True), *args[1:])
        if layout is not None and 0 in get_platform().shape(args[0]):
            result = _of_nothing(args[0], summed.values())
        else:
            result = backend.call_with(module, forward, summed, args, kwargs)
        if layout is None or self.use_local:
            return result
        return deliver(result, layout.replace([self.input]), self.input, use_local=False)


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


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Bring a module's inputs to other placements.

    Args:
        input_layouts: how plain positional inputs lie; a tuple with None for those to leave alone.
        desired_input_layouts: how they shall lie.
        input_kwarg_layouts: the same for keyword arguments.
        desired_input_kwarg_layouts: how these shall lie.
        use_local_output: give plain local tensors, else DTensors.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Placement] | None = None
    desired_input_kwarg_layouts: Mapping[str, Placement] | None = None
    use_local_output: bool = False

    def bind(self, site: Site) -> ActivationRule:
        """See :class:`ParallelStyle`."""
        named, wanted = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        if set(named) != set(wanted):
            names = f"input_kwarg_layouts name {sorted(named)}, desired_input_kwarg_layouts {sorted(wanted)}"
            raise site.refuse(self, names)
        inputs = _move(self, site, self.input_layouts, self.desired_input_layouts, self.use_local_output)
        if inputs is None and not named:
            raise site.refuse(self, "neither input_layouts nor input_kwarg_layouts are given")
        return ActivationRule(
            mesh=site.mesh,
            inputs=inputs,
            named_inputs={name: (named[name], wanted[name]) for name in named},
            named_use_local=self.use_local_output,
        )


@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """Bring a module's outputs to other placements.

    Args:
        output_layouts: how plain outputs lie; a tuple with None for those to leave alone.
        desired_output_layouts: how they shall lie.
        use_local_output: give plain local tensors, else DTensors.
    """

    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def bind(self, site: Site) -> ActivationRule:
        """See :class:`ParallelStyle`."""
        outputs = _move(self, site, self.output_layouts, self.desired_output_layouts, self.use_local_output)
        if outputs is None:
            raise site.refuse(self, "output_layouts are not given")
        return ActivationRule(mesh=site.mesh, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: of the inputs.
        use_local_input: give the module plain local tensors, else DTensors.
        output_layouts, desired_output_layouts, use_local_output: of the outputs.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Placement] | None = None
    desired_input_kwarg_layouts: Mapping[str, Placement] | None = None
    use_local_input: bool = False
    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def bind(self, site: Site) -> ActivationRule:
        """See :class:`ParallelStyle`."""
        before = PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        )
        after = PrepareModuleOutput(
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        )
        return replace(before.bind(site), outputs=after.bind(site).outputs)


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Run a norm or dropout on a sequence that is sharded over the ranks; its parameters stay whole.

    Placements: x S(sequence_dim) -> y S(sequence_dim). The gradients of the parameters are summed over the
        ranks.

    Args:
        sequence_dim: the dim that is sharded.
        use_local_output: give a plain local tensor, else a DTensor.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        return SummedRule(
            mesh=site.mesh,
            cuts=site.whole(),
            input=Shard(self.sequence_dim),
            use_local=self.use_local_output,
            move=True,
        )


@dataclass(frozen=True, kw_only=True)
class SummedGradients(ParallelStyle):
    """Leave a module as it is and sum its parameters' gradients over the ranks: a norm on sharded heads."""

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        return SummedRule(mesh=site.mesh, cuts=site.whole())


@dataclass(frozen=True, kw_only=True)
class NoParallel(ParallelStyle):
    """Every rank computes the whole module on the same input, so that its gradients are equal without
    communication.

    Args:
        input_layout: how a plain first input lies, by default ``Replicate()``; it is brought to
            ``Replicate()``.
        output_layout: how the output shall lie, by default ``Replicate()``.
        use_local_output: give plain local tensors, else DTensors.
    """

    input_layout: Placement | None = None
    output_layout: Placement | None = None
    use_local_output: bool = True

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        return WholeRule(
            mesh=site.mesh,
            cuts=site.whole(),
            input=self.input_layout or Replicate(),
            output=self.output_layout or Replicate(),
            use_local=self.use_local_output,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class WholeRule(Rule):
    """The first input whole on every rank; a single output brought to its placement."""

    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(
            move_one(x, self.mesh, self.input, Replicate(), use_local=True) if i == 0 else x
            for i, x in enumerate(args)
        )
        result = forward(*args, **kwargs)
        if isinstance(result, tuple):
            first = move_one(result[0], self.mesh, Replicate(), self.output, self.use_local)
            return (first, *result[1:])
        return move_one(result, self.mesh, Replicate(), self.output, self.use_local)


def _move(style: ParallelStyle, site: Site, given: Layouts, wanted: Layouts, use_local: bool) -> _Move | None:
    if given is None and wanted is None:
        return None
    before, after = _as_tuple(given), _as_tuple(wanted)
    if len(before) != len(after):
        raise site.refuse(style, f"{len(before)} layouts {before} for {len(after)} desired ones {after}")
    for x in (*before, *after):
        if x is not None and not isinstance(x, Placement):
            raise ParallelPlanError(f"expected Shard(dim), Replicate() or None as layout, found {x!r}")
    return _Move(before, after, use_local)


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    if layouts is None:
        return ()
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
