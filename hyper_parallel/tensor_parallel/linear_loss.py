"""A last layer whose logits are computed with their loss, some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.redistribute import redistribute_local
from hyper_parallel.loss_parallel.uncomputed import LastLayer, UncomputedLogits
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import Module
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.activations import take_apart
from hyper_parallel.tensor_parallel.rules import ColumnRule, Rule
from hyper_parallel.tensor_parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    Site,
    check_layouts,
    check_shareable,
    placement_of,
)
from hyper_parallel.tensor_parallel.widths import sharded_size

__all__ = ["LinearLossParallel"]

_opaque = get_platform().opaque


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearLossRule(Rule):
    """Gives the logits uncomputed; no collective runs here, except for an input that is sharded over its features or
    still to be reduced.

    Attributes:
        head: computes them where they are asked for.
        chunk_size: see :class:`LinearLossParallel`.
    """

    head: ColumnRule
    chunk_size: int | None = None

    @_opaque
    def __call__(self, module: Module, forward: Callable[..., Any], input: Any) -> UncomputedLogits:
        where = self.place(module)
        size = sharded_size(input, self.input, self.head.in_features, where)
        hidden, layout = take_apart(input, self.mesh, self.input, size, where=where)
        if not _over_tokens(layout):
            whole = layout.replace([Replicate()])
            hidden, layout = redistribute_local(hidden, layout, whole), whole
        layer = LastLayer(
            weight=_view(module.weight),
            bias=_view(getattr(module, "bias", None)),
            num_classes=self.head.out_features,
            compute=lambda x: self.head(module, forward, x),
            chunk_size=self.chunk_size,
        )
        return UncomputedLogits(hidden, layout, layer)


def _over_tokens(layout: Layout) -> bool:
    """Whether all ranks hold all hidden states, or each those of some tokens."""
    placement = layout.placements[0]
    if isinstance(placement, Shard):
        return placement.dim < layout.ndim - 1
    return isinstance(placement, Replicate)


def _view(parameter: Any) -> Tensor | None:
    """A view: MindSpore takes the gradient of a parameter itself for one of the size it was made with."""
    platform = get_platform()
    return None if parameter is None else platform.reshape(parameter, platform.shape(parameter))


@dataclass(frozen=True, kw_only=True)
class LinearLossParallel(ParallelStyle):
    """Share the classes of a last layer, and compute its logits together with their loss: never all at a time.

    The layer gives :class:`UncomputedLogits`; the framework's cross-entropy of these inside ``loss_parallel()`` is
    :func:`linear_cross_entropy`, with the same loss and gradients as those of ``"colwise_loss_parallel"``. In a plan
    its name is ``"linear_loss"``.

    Placements: weight and bias S(0); x R, or S(d) over tokens -> the loss R.

    Args:
        input_layouts: how a plain input lies, by default ``Replicate()``. ``Shard(1)``: over the sequence, evenly. A
            DTensor says it itself.
        chunk_size: tokens whose logits are there at a time; None: the choice of :func:`linear_cross_entropy`.

    Example:
        >>> LinearLossParallel().describe()
        'LinearLossParallel'
    """

    input_layouts: Placement | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        check_layouts(self.input_layouts)

    def bind(self, site: Site) -> Rule:
        """See :class:`ParallelStyle`."""
        check_shareable(self, site)
        if site.facts.kind != "linear" or site.facts.transposed:
            raise site.refuse(self, f"it is a {site.facts.type_name}; expected a linear layer with a weight [out, in]")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise site.refuse(self, f"chunk_size is {self.chunk_size}; expected at least 1 or None")
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False).bind(site)
        assert isinstance(head, ColumnRule)
        return LinearLossRule(
            mesh=site.mesh,
            cuts=head.cuts,
            input=placement_of(self.input_layouts, Replicate()),
            where=site.name,
            head=head,
            chunk_size=self.chunk_size,
        )

    def describe(self) -> str:
        """One short line for reports."""
        return "LinearLossParallel" if self.input_layouts is None else f"LinearLossParallel {self.input_layouts} ->"
