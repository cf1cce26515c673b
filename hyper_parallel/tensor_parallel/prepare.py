"""Styles that leave a module's arithmetic alone: inputs and outputs brought to a placement, norms on a
sharded sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.tensor_parallel.activation_rules import ActivationRule, Move, SummedRule, WholeRule
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

Layouts = Placement | Sequence[Placement | None] | None


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

    def __post_init__(self) -> None:
        _check(self.input_layouts, self.desired_input_layouts)
        for named in (self.input_kwarg_layouts, self.desired_input_kwarg_layouts):
            _check(*(named or {}).values())

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
            where=site.name,
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

    def __post_init__(self) -> None:
        _check(self.output_layouts, self.desired_output_layouts)

    def bind(self, site: Site) -> ActivationRule:
        """See :class:`ParallelStyle`."""
        outputs = _move(self, site, self.output_layouts, self.desired_output_layouts, self.use_local_output)
        if outputs is None:
            raise site.refuse(self, "output_layouts are not given")
        return ActivationRule(mesh=site.mesh, where=site.name, outputs=outputs)


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

    def __post_init__(self) -> None:
        self._both()

    def _both(self) -> tuple[PrepareModuleInput, PrepareModuleOutput]:
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
        return before, after

    def bind(self, site: Site) -> ActivationRule:
        """See :class:`ParallelStyle`."""
        before, after = self._both()
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

    def __post_init__(self) -> None:
        Shard(self.sequence_dim)  # refuses what is no dim

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        return SummedRule(
            mesh=site.mesh,
            cuts=site.whole(),
            where=site.name,
            input=Shard(self.sequence_dim),
            use_local=self.use_local_output,
            move=True,
        )


@dataclass(frozen=True, kw_only=True)
class SummedGradients(ParallelStyle):
    """Leave a module as it is and sum its parameters' gradients over the ranks: a norm on sharded heads."""

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        return SummedRule(mesh=site.mesh, cuts=site.whole(), where=site.name)


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

    def __post_init__(self) -> None:
        _check(self.input_layout, self.output_layout)

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        return WholeRule(
            mesh=site.mesh,
            cuts=site.whole(),
            where=site.name,
            input=self.input_layout or Replicate(),
            output=self.output_layout or Replicate(),
            use_local=self.use_local_output,
        )


def _move(style: ParallelStyle, site: Site, given: Layouts, wanted: Layouts, use_local: bool) -> Move | None:
    if given is None and wanted is None:
        return None
    before, after = _as_tuple(given), _as_tuple(wanted)
    if len(before) != len(after):
        raise site.refuse(style, f"{len(before)} layouts {before} for {len(after)} desired ones {after}")
    return Move(before, after, use_local)


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    if layouts is None:
        return ()
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _check(*given: Layouts) -> None:
    """Refuse what can be no layout, as soon as a style is made.

    Raises:
        ParallelPlanError: no placements.
    """
    for layouts in given:
        for x in layouts if isinstance(layouts, (tuple, list)) else (layouts,):
            if x is not None and not isinstance(x, Placement):
                raise ParallelPlanError(f"expected Shard(dim), Replicate() or None as layout, found {x!r}")
