"""How a plan treats the modules that its patterns name. Names and defaults are those of
``torch.distributed.tensor.parallel``.

A style checks a module and gives the rule that will run in it; only :func:`parallelize_module` changes
modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform.modules import LayerFacts
from hyper_parallel.tensor_parallel.rules import (
    ColumnRule,
    EmbeddingColumnRule,
    RowRule,
    Rule,
    VocabRule,
    is_plain_cut,
)
from hyper_parallel.tensor_parallel.shard_loader import ParallelRule, rule_spec

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "RowwiseParallel",
    "Site",
    "check_layouts",
    "check_shareable",
    "placement_of",
]


@dataclass(frozen=True)
class Site:
    """A module that a style is asked to treat.

    Attributes:
        name: its dotted name.
        facts: what layer it is.
        shapes: shapes of its own parameters, whole.
        mesh: the ranks.
        parts: sizes of the fused parts of its output features, where they are known; else empty.
        heads: the number of attention heads in each part; else empty.
    """

    name: str
    facts: LayerFacts
    shapes: Mapping[str, tuple[int, ...]]
    mesh: DeviceMesh
    parts: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    def cuts(self, rule: ParallelRule) -> dict[str, ShardSpec]:
        """How the loader of ``rule`` cuts the module's parameters."""
        return {
            name: rule_spec(rule, ".weight" if name == self.facts.weight else f".{name}", shape, self.mesh.size())
            for name, shape in self.shapes.items()
        }

    def whole(self) -> dict[str, ShardSpec]:
        """Parameters that stay whole."""
        return self.cuts(ParallelRule("replicate"))

    def refuse(self, style: ParallelStyle, why: str) -> ParallelPlanError:
        """The error for a module that does not fit."""
        return ParallelPlanError(f"{type(style).__name__} cannot treat {self.name or 'the module'}: {why}")


class ParallelStyle(ABC):
    """How the ranks share a module."""

    @abstractmethod
    def bind(self, site: Site) -> Rule:
        """The rule for one module. Runs no collective and changes nothing.

        Raises:
            ParallelPlanError: the module does not fit.
        """

    def describe(self) -> str:
        """One short line for reports."""
        return repr(self)


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(ParallelStyle):
    """Share the output features of a linear layer, or the width of an embedding.

    Placements: weight and bias S(0) (an embedding's weight S(1)); x R -> y S(-1).

    Args:
        input_layouts: how a plain input lies, by default ``Replicate()``. ``Shard(1)``: sharded over the
            sequence; it is gathered, and its gradient is reduce-scattered.
        output_layouts: how the output shall lie, by default ``Shard(-1)``. ``Replicate()``: gathered.
        use_local_output: give a plain local tensor, else a DTensor. A last layer for ``loss_parallel()`` is
            ``ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)``.
        parts: sizes of the fused parts of the output features (q/k/v, gate/up), each cut on its own; an
            integer: so many equal parts. Known ones (``qkv_proj``, ``c_attn``, ``gate_up_proj``) need not
            be given.
        heads: the number of attention heads, for each part where there are several; heads stay whole, and
            are held by several ranks where these outnumber them. Attention of models with a config need not
            give it.
        kind: the loader kind that cuts the weights, when it is not one of the built-in ones.

    Example:
        >>> ColwiseParallel(output_layouts=Shard(-1), use_local_output=False).describe()
        'ColwiseParallel -> S(-1) DTensor'
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    parts: Sequence[int] | int = ()
    heads: Sequence[int] | int = ()
    kind: str | None = None

    def __post_init__(self) -> None:
        check_layouts(self.input_layouts, self.output_layouts)

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        output = placement_of(self.output_layouts, Shard(-1))
        settings: dict[str, Any] = {
            "mesh": site.mesh,
            "input": placement_of(self.input_layouts, Replicate()),
            "output": output,
            "use_local": self.use_local_output,
            "where": site.name,
            "out_features": site.facts.out_features,
        }
        check_shareable(self, site)
        if site.facts.kind == "embedding":
            cuts = site.cuts(ParallelRule(self.kind or "column_embed"))
            return EmbeddingColumnRule(cuts=cuts, **_lookup_settings(site.facts), **settings)
        # dim 2 is the last one of [batch, sequence, features]
        stays_sharded = output in (Shard(-1), Shard(2)) and self.use_local_output
        cuts = site.cuts(self._loader_rule(site, stays_sharded))
        if not (is_plain_cut(cuts["weight"]) or stays_sharded):
            raise site.refuse(
                self,
                "fused parts and shared heads lie over the ranks as no placement can say; expected "
                "output_layouts=Shard(-1) and use_local_output=True",
            )
        return ColumnRule(cuts=cuts, transposed=site.facts.transposed, **settings)

    def _loader_rule(self, site: Site, stays_sharded: bool) -> ParallelRule:
        """Parts and heads that the user gave, else those that are known of the module and matter."""
        features, transposed = site.facts.out_features, site.facts.transposed
        if isinstance(self.parts, int):
            if self.parts < 1 or features % self.parts:
                raise site.refuse(self, f"{features} output features are not {self.parts} equal parts")
            parts = (features // self.parts,) * self.parts
        else:
            parts = tuple(self.parts)
        heads = (self.heads,) if isinstance(self.heads, int) else tuple(self.heads)
        if not parts and not heads and stays_sharded:
            parts, heads = site.parts, site.heads
        if len(parts) > 1:
            kind = "fused_column"
        else:
            kind = "head_column" if heads else "column"
        return ParallelRule(self.kind or kind, parts, heads, transposed)

    def describe(self) -> str:
        """One short line for reports."""
        given = f"{placement_of(self.input_layouts, Replicate())} -> " if self.input_layouts else "-> "
        dtensor = "" if self.use_local_output else " DTensor"
        return f"ColwiseParallel {given}{placement_of(self.output_layouts, Shard(-1))}{dtensor}"


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(ParallelStyle):
    """Share the input features of a linear layer, or the rows (the vocabulary) of an embedding.

    Placements: weight S(1), bias R (an embedding's weight S(0)); x S(-1) (ids R) -> y R. The bias is added
        once.

    Args:
        input_layouts: how a plain input lies, by default ``Shard(-1)`` (ids: ``Replicate()``).
            ``Replicate()``: each rank takes its features.
        output_layouts: how the output shall lie, by default ``Replicate()``, by an all-reduce.
            ``Shard(1)``: over the sequence, by a reduce-scatter.
        use_local_output: give a plain local tensor, else a DTensor.
        kind: the loader kind that cuts the weights, when it is not one of the built-in ones.
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None
    use_local_output: bool = True
    kind: str | None = None

    def __post_init__(self) -> None:
        check_layouts(self.input_layouts, self.output_layouts)

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        facts = site.facts
        is_embedding = facts.kind == "embedding"
        settings: dict[str, Any] = {
            "mesh": site.mesh,
            "input": placement_of(self.input_layouts, Replicate() if is_embedding else Shard(-1)),
            "output": placement_of(self.output_layouts, Replicate()),
            "use_local": self.use_local_output,
            "where": site.name,
        }
        check_shareable(self, site)
        if is_embedding:
            cuts = site.cuts(ParallelRule(self.kind or "vocab_embed"))
            return VocabRule(cuts=cuts, **_lookup_settings(facts), **settings)
        cuts = site.cuts(ParallelRule(self.kind or "row", transposed=facts.transposed))
        return RowRule(cuts=cuts, in_features=facts.in_features, transposed=facts.transposed, **settings)

    def describe(self) -> str:
        """One short line for reports."""
        given = f"{self.input_layouts} -> " if self.input_layouts else "-> "
        dtensor = "" if self.use_local_output else " DTensor"
        return f"RowwiseParallel {given}{placement_of(self.output_layouts, Replicate())}{dtensor}"


def check_shareable(style: ParallelStyle, site: Site) -> None:
    """Whether the module is a layer whose arithmetic is known.

    Raises:
        ParallelPlanError: it is another one, or it has an option that needs the whole layer.
    """
    facts = site.facts
    if facts.kind not in ("linear", "embedding"):
        raise site.refuse(style, f"it is a {facts.type_name}; expected a linear layer or an embedding")
    if facts.refusal:
        raise site.refuse(style, f"{facts.type_name} with {facts.refusal} is not supported")
    unknown = sorted(set(site.shapes) - {facts.weight, "bias"})
    if unknown:
        raise site.refuse(style, f"it has parameters {unknown} beside weight and bias")


def _lookup_settings(facts: LayerFacts) -> dict[str, Any]:
    return {"padding_idx": facts.padding_idx, "scale": facts.scale, "weight": facts.weight}


def check_layouts(*given: Placement | None) -> None:
    """Refuse what can be no layout, as soon as a style is made.

    Raises:
        ParallelPlanError: see :func:`placement_of`.
    """
    for layout in given:
        placement_of(layout, Replicate())


def placement_of(given: Placement | None, default: Placement) -> Placement:
    """The placement to use.

    Raises:
        ParallelPlanError: no Shard or Replicate.
    """
    if given is None:
        return default
    if isinstance(given, (tuple, list)) and len(given) == 1:  # PyTorch takes both
        given = given[0]
    if not isinstance(given, (Shard, Replicate)):
        raise ParallelPlanError(f"expected Shard(dim) or Replicate() as layout, found {given!r}")
    return given
