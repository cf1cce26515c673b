"""From a model and a plan to a checked list of what to change. Nothing is changed here, no collective
runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import LayerFacts, Module, Parameter, get_module_backend
from hyper_parallel.tensor_parallel.attention import Attention, find_attention, fused_parts
from hyper_parallel.tensor_parallel.auto_plan import base_prefixes
from hyper_parallel.tensor_parallel.between import keeps_shards, rules_between
from hyper_parallel.tensor_parallel.kinds import style_of
from hyper_parallel.tensor_parallel.patterns import match_patterns
from hyper_parallel.tensor_parallel.report import PlanReport, ReportedParameter, ReportedRule
from hyper_parallel.tensor_parallel.rules import ColumnRule, Rule
from hyper_parallel.tensor_parallel.shared_input import SharedInput
from hyper_parallel.tensor_parallel.siblings import check_siblings
from hyper_parallel.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, Site
from hyper_parallel.tensor_parallel.summed import summed_without_parts
from hyper_parallel.tensor_parallel.watch import WidthRule, rules_for_neighbours

__all__ = ["BoundModule", "Planned", "plan_model"]


@dataclass(frozen=True)
class BoundModule:
    """A module and the rule that it shall get."""

    name: str
    module: Module
    pattern: str
    style: ParallelStyle
    rule: Rule


@dataclass
class Planned:
    """All that is to be done.

    Attributes:
        bound: the modules that get a rule.
        attributes: modules and what to set on them.
        watched: modules that stay whole, and a rule that looks at what they are given.
        doubtful: names of modules whose gradients are summed without a visible reason.
        report: what to tell the user.
    """

    bound: list[BoundModule]
    attributes: list[tuple[Module, Mapping[str, Any]]]
    watched: list[tuple[Module, WidthRule]]
    doubtful: list[str]
    report: PlanReport


def plan_model(
    model: Module, mesh: DeviceMesh, plan: Mapping[str, str | ParallelStyle], *, automatic: bool = False
) -> Planned:
    """Check a plan against a model.

    Args:
        model: the model.
        mesh: 1-D.
        plan: name patterns -> styles.
        automatic: whether rules may be added that the plan leaves out.

    Raises:
        ParallelPlanError: see :func:`parallelize_module`.
    """
    return _Planner(model, mesh).plan(plan, automatic)


@dataclass
class _Planner:
    model: Module
    mesh: DeviceMesh
    modules: dict[str, Module] = field(init=False)
    facts: dict[str, LayerFacts] = field(init=False)
    owners: dict[int, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        backend = get_module_backend()
        self.modules = dict(backend.named_modules(self.model))
        self.facts = {name: backend.describe(module) for name, module in self.modules.items()}
        self.owners = {}  # parameter -> its names, several for tied ones
        for name, parameter in self._parameters():
            self.owners.setdefault(id(parameter), []).append(name)

    def plan(self, plan: Mapping[str, str | ParallelStyle], automatic: bool) -> Planned:
        styles = {pattern: style_of(kind, pattern) for pattern, kind in plan.items()}
        layers = [name for name, facts in self.facts.items() if facts.kind != "other"]
        matched = match_patterns(
            list(styles),
            list(self.modules),
            base_prefixes(self.model),
            [name for name, _ in self._parameters()],
            layers,
        )
        chosen = {name: (pattern, styles[pattern]) for pattern, names in matched.items() for name in names}
        self._add_tied(chosen)
        doubtful: list[str] = []
        if self.mesh.size() > 1:
            check_siblings(self.facts, chosen)
            doubtful = [] if automatic else summed_without_parts(chosen)
        attentions = self._attentions(chosen)
        chosen |= rules_between(self.modules, self.facts, chosen, attentions, automatic)
        bound = [
            BoundModule(name, self.modules[name], pattern, style, style.bind(self._site(name, attentions)))
            for name, (pattern, style) in chosen.items()
        ]
        bound = _share_inputs(bound)
        self._check_tied(bound)
        attributes = [(self.modules[name], attention.attributes) for name, attention in attentions.items()]
        neighbours = rules_for_neighbours(self.facts, chosen, self.mesh)
        watched = [(self.modules[name], rule) for name, rule in neighbours.items()]
        report = self._report(bound, [n for n in layers if n not in chosen])
        return Planned(bound, attributes, watched, doubtful, report)

    # -- additions to the plan -------------------------------------------------------------------------------

    def _add_tied(self, chosen: dict[str, tuple[str, ParallelStyle]]) -> None:
        """A layer that shares its weight with a chosen one is shared too, such that its output stays what
        it was.
        """
        for names in self.owners.values():
            modules = [name.rpartition(".")[0] for name in names]
            named = [m for m in modules if m in chosen and self.facts[m].kind != "other"]
            for other in modules:
                if not named or other in chosen:
                    continue
                pattern = f"{other} (tied to {named[0]})"
                if self.facts[other].kind == "embedding":
                    chosen[other] = (pattern, RowwiseParallel(input_layouts=Replicate()))
                elif self.facts[other].kind == "linear":
                    chosen[other] = (pattern, ColwiseParallel(output_layouts=Replicate()))

    def _attentions(self, chosen: Mapping[str, tuple[str, ParallelStyle]]) -> dict[str, Attention]:
        """Attention modules whose projections keep their sharded output."""
        children: dict[str, dict[str, LayerFacts]] = {}
        for name, (_, style) in chosen.items():
            if self.facts[name].kind == "linear" and keeps_shards(style) and not _says_heads(style):
                parent, _, child = name.rpartition(".")
                children.setdefault(parent, {})[child] = self.facts[name]
        found = {}
        for parent, columns in children.items():
            attention = find_attention(
                parent, self.modules[parent], columns, self._config_above(parent), self.mesh.size()
            )
            if attention is not None:
                found[parent] = attention
        return found

    def _config_above(self, name: str) -> Any:
        """The nearest config that speaks of attention heads, from the module upwards."""
        while True:
            config = getattr(self.modules.get(name), "config", None)
            if config is not None and getattr(config, "num_attention_heads", None):
                return config
            if not name:
                return config
            name = name.rpartition(".")[0]

    def _site(self, name: str, attentions: Mapping[str, Attention]) -> Site:
        platform, backend = get_platform(), get_module_backend()
        shapes = {}
        for own, parameter in backend.own_parameters(self.modules[name]).items():
            if getattr(parameter, "_shard_spec", None) is not None:
                raise ParallelPlanError(f"{name}.{own} is already shared between ranks; expected a whole model")
            shapes[own] = platform.shape(parameter)
        parent, _, child = name.rpartition(".")
        parts = attentions[parent].projections.get(child) if parent in attentions else None
        parts = parts or fused_parts(child, self.facts[name])
        return Site(
            name,
            self.facts[name],
            shapes,
            self.mesh,
            parts.parts if parts else (),
            parts.heads if parts else (),
        )

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_tied(self, bound: list[BoundModule]) -> None:
        """Layers that share a parameter must cut it alike."""
        cuts = {f"{b.name}.{p}" if b.name else p: spec for b in bound for p, spec in b.rule.cuts.items()}
        for names in self.owners.values():
            cut = {name: cuts.get(name) for name in names}
            first = cut[names[0]]
            if len(names) > 1 and any(_cut(spec) != _cut(first) for spec in cut.values()):
                found = "; ".join(
                    f"{name}: {'whole' if _cut(spec) is None else f'dim {spec.dim}'}"  # type: ignore[union-attr]
                    for name, spec in cut.items()
                )
                raise ParallelPlanError(f"one parameter under several names is cut in several ways ({found})")

    # -- report ----------------------------------------------------------------------------------------------

    def _report(self, bound: list[BoundModule], unsharded: list[str]) -> PlanReport:
        by_pattern: dict[str, list[BoundModule]] = {}
        for b in bound:
            by_pattern.setdefault(b.pattern, []).append(b)
        specs = {f"{b.name}.{p}" if b.name else p: s for b in bound for p, s in b.rule.cuts.items()}
        parameters = {name: self._reported(name, p, specs.get(name)) for name, p in self._parameters()}
        rules = tuple(
            ReportedRule(
                pattern,
                members[0].style.describe(),
                tuple(b.name for b in members),
                tuple(
                    parameters[f"{b.name}.{p}" if b.name else p]
                    for b in members
                    for p in get_module_backend().own_parameters(b.module)
                    if p in b.rule.cuts
                ),
            )
            for pattern, members in by_pattern.items()
        )
        whole = tuple(p for name, p in parameters.items() if name not in specs and p.tied_to is None)
        return PlanReport(self.mesh.size(), self.mesh.get_local_rank(), rules, whole, tuple(unsharded))

    def _reported(self, name: str, parameter: Parameter, spec: ShardSpec | None) -> ReportedParameter:
        size = get_module_backend().element_size(parameter)
        shape = get_platform().shape(parameter)
        spec = spec or ShardSpec.replicated(shape, self.mesh.size())
        local = [spec.local_shape(rank) for rank in range(self.mesh.size())]
        first = self.owners[id(parameter)][0]
        return ReportedParameter(
            name,
            shape,
            local[self.mesh.get_local_rank()],
            tuple(size * _count(s) for s in local),
            None if first == name else first,
        )

    def _parameters(self) -> list[tuple[str, Parameter]]:
        """Under every name that they have."""
        return [
            (f"{name}.{own}" if name else own, parameter)
            for name, module in self.modules.items()
            for own, parameter in get_module_backend().own_parameters(module).items()
        ]


def _share_inputs(bound: list[BoundModule]) -> list[BoundModule]:
    """Column-parallel layers side by side (query, key and value; gate and up) usually take the same input."""
    parents = Counter(b.name.rpartition(".")[0] for b in bound if isinstance(b.rule, ColumnRule))
    shared = {parent: SharedInput(count) for parent, count in parents.items() if count > 1}
    return [
        replace(b, rule=replace(b.rule, shared_input=shared.get(b.name.rpartition(".")[0])))
        if isinstance(b.rule, ColumnRule)
        else b
        for b in bound
    ]


def _says_heads(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and bool(style.heads)


def _cut(spec: ShardSpec | None) -> ShardSpec | None:
    return None if spec is None or spec.dim is None else spec


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
