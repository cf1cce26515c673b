"""Views that regroup dims. A sharded dim has to stay leftmost in its group, with its boundaries where they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from numbers import Integral
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Placement, Shard
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan, TensorArg
from hyper_parallel.core.shard.ops._shapes import complete_shape, flatten_ints, normal_dim
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform import get_platform

__all__ = ["Flatten", "Reshape", "ReshapeAs", "Unflatten", "reshaped_layout"]


def reshaped_layout(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout after a reshape, or None where the ranks' parts would not be parts of the new dims.

    Example: ``(B, S, V)`` with V sharded becomes ``(B * S, V)`` with V sharded; with B sharded, ``B * S`` is.
    """
    placements: list[Placement] = []
    for p in layout.placements:
        new_dim = _new_dim(layout.shape, tuple(shape), p.dim) if isinstance(p, Shard) else None
        if isinstance(p, Shard) and new_dim is None:
            return None
        placements.append(Shard(new_dim) if new_dim is not None else p)
    new = layout.replace(placements, shape)
    return new if _same_parts(layout, new) else None


def _new_dim(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int | None:
    """The dim of ``new`` whose stride and position match those of ``dim``: what is left of both multiplies to the same.

    Of several (sizes of 1 between them) the one with the same size, else the first that is larger than 1.
    """
    left = prod(old[:dim])
    if left == 0 or prod(old) == 0:
        return _match_empty(old, new, dim)
    found = [j for j in range(len(new)) if prod(new[:j]) == left]
    for wanted in ([j for j in found if new[j] == old[dim]], [j for j in found if new[j] > 1]):
        if wanted:
            return wanted[0]
    return None


def _match_empty(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int | None:
    """Without elements products say nothing: a dim is found again in equal sizes at either end."""
    if old[: dim + 1] == new[: dim + 1]:
        return dim
    behind = len(old) - dim
    return len(new) - behind if behind <= len(new) and old[dim:] == new[-behind:] else None


def _same_parts(old: Layout, new: Layout) -> bool:
    """Whether every rank's range of a sharded dim is its range of the new dim, counted in elements."""
    if prod(old.shape) == 0:
        return True
    pairs = {
        (p.dim, q.dim)
        for p, q in zip(old.placements, new.placements, strict=True)
        if isinstance(p, Shard) and isinstance(q, Shard)
    }
    for rank in old.mesh.mesh.ravel().tolist():
        before, after = old.local_ranges(rank), new.local_ranges(rank)
        for p, q in pairs:
            unit_old, unit_new = prod(old.shape[p + 1 :]), prod(new.shape[q + 1 :])
            if [i * unit_old for i in before[p]] != [i * unit_new for i in after[q]]:
                return False
    return True


class _Regroup(DistributedOp):
    """Shared by the spellings: the new global shape decides."""

    def plan_shape(self, call: OpCall, shape: Sequence[int]) -> OpPlan:
        layout = self.output(call, shape)
        return OpPlan(layout, run=_reshape_to(layout.local_shape))

    def output(self, call: OpCall, shape: Sequence[int]) -> Layout:
        source: Layout = call.args["input"].layout
        complete = complete_shape(shape, prod(source.shape))
        layout = reshaped_layout(source, complete)
        if layout is None:
            raise self.refuse(
                call,
                f"cannot become {complete}: a sharded dim has to be the leftmost of those it is joined with or split "
                "into, and every rank's part a whole number of rows of the new dim",
            )
        return layout


def _reshape_to(shape: tuple[int, ...]) -> Callable[..., Any]:
    return lambda _, input, *args, **kwargs: get_platform().reshape(input, shape)


@register_distributed_op("reshape")
class Reshape(_Regroup):
    """view, reshape."""

    signature = "input, *shape"

    def plan(self, call: OpCall) -> OpPlan:
        given = call.args["shape"]
        nested = len(given) == 1 and not isinstance(given[0], Integral)
        if nested and not isinstance(given[0], (tuple, list)):
            raise self.refuse(call, f"a view as {given[0]!r}")
        layout = self.output(call, flatten_ints(given))
        local = layout.local_shape
        return OpPlan(layout, replace={"shape": (local,) if nested else local})


@register_distributed_op("reshape_as")
class ReshapeAs(_Regroup):
    """view_as, reshape_as: of the other tensor only the global shape matters."""

    signature = "input, other"

    def plan(self, call: OpCall) -> OpPlan:
        other = call.args["other"]
        if not isinstance(other, TensorArg):
            raise TypeError(f"{call.name} takes a tensor, found {other!r}")
        return self.plan_shape(call, other.shape)


@register_distributed_op("flatten")
class Flatten(_Regroup):
    """flatten, ravel."""

    signature = "input, start_dim=0, end_dim=-1"

    def plan(self, call: OpCall) -> OpPlan:
        shape = call.args["input"].shape
        first, last = (normal_dim(call.args[name], len(shape)) for name in ("start_dim", "end_dim"))
        if first > last:
            raise ValueError(f"{call.name}: start_dim {first} is behind end_dim {last}")
        return self.plan_shape(call, (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]))


@register_distributed_op("unflatten")
class Unflatten(_Regroup):
    """Split one dim."""

    signature = "input, dim, sizes"

    def plan(self, call: OpCall) -> OpPlan:
        shape = call.args["input"].shape
        dim = normal_dim(call.args["dim"], len(shape))
        sizes = complete_shape(flatten_ints(call.args["sizes"]), shape[dim])
        return self.plan_shape(call, (*shape[:dim], *sizes, *shape[dim + 1 :]))
