"""From one placement to another, differentiably, on meshes of any number of dims.

Each step changes one mesh dim and is a linear map with an explicit adjoint. With the dual of a placement being the
placement of its gradient (Shard -> Shard, Replicate -> Replicate, Partial -> Replicate), the adjoint of ``p -> q`` is
``dual(q) -> dual(p)``, and that of the adjoint is ``dual(p) -> dual(q)``:

====================  =========================  ==========================
step                  forward                    backward
====================  =========================  ==========================
Partial -> Replicate  all-reduce                 identity
Partial -> Shard      reduce-scatter             all-gather
Shard -> Replicate    all-gather                 slice
Replicate -> Shard    slice                      all-gather
Shard -> Shard        all-to-all                 all-to-all
Shard -> Partial      zeros around own piece     slice
Replicate -> Partial  zeros but on one rank      identity
====================  =========================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard_spec import Range, chunk_ranges
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["redistribute_local", "reduce_gradient", "redistribution_steps"]

Step = tuple[int, Placement, Placement]
Mover = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]


def redistribute_local(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """Turn the local tensor of ``source`` into that of ``target`` (same mesh and shape). Differentiable.

    Raises:
        ValueError: meshes or shapes differ, or a max/min Partial that a gradient should flow through.
    """
    if source == target:
        return local
    if source.mesh != target.mesh or source.shape != target.shape:
        raise ValueError(f"cannot redistribute {source!r} to {target!r}: mesh and shape must agree")
    platform = get_platform()
    for move in _route(source, target):
        if move.no_gradient and platform.requires_grad(local):
            raise ValueError(f"{move.no_gradient} on {source.describe()} has no gradient; detach the tensor first")
        local = platform.linear_map(local, move.forward, move.adjoint, move.again)
    return local


def redistribution_steps(source: Sequence[Placement], target: Sequence[Placement]) -> list[Step]:
    """The changes of one mesh dim at a time that lead from ``source`` to ``target``.

    A mesh dim that shares a tensor dim with an outer, changing one is gathered first: its pieces are pieces of pieces.
    """
    n = len(source)
    reset = {d for d in range(n) if source[d] != target[d]}
    for d in sorted(reset):
        touched = _dims(source[d]) | _dims(target[d])
        reset |= {e for e in range(d + 1, n) if (_dims(source[e]) | _dims(target[e])) & touched}
    current, steps = list(source), []

    def change(d: int, after: Placement) -> None:
        if current[d] != after:
            steps.append((d, current[d], after))
            current[d] = after

    for d in sorted(reset):
        if _is_extremum(current[d]):  # before another mesh dim becomes a sum: terms of two kinds do not mix
            change(d, Replicate())
    for d in sorted(reset, reverse=True):
        touched = _dims(current[d]) | _dims(target[d])
        alone = not any((_dims(current[e]) | _dims(target[e])) & touched for e in range(n) if e != d)
        change(d, target[d] if alone else Replicate())
    for d in sorted(reset):
        change(d, target[d])
    return steps


def reduce_gradient(local: Tensor, layout: Layout, mesh_dims: Sequence[int]) -> Tensor:
    """Identity whose gradient is all-reduced over ``mesh_dims``: for a replicated input of sharded work."""
    platform = get_platform()

    def adjoint(grad: Tensor) -> Tensor:
        for d in mesh_dims:
            grad = platform.all_reduce(grad, "sum", layout.mesh.get_group(d))
        return grad

    return platform.linear_map(local, lambda x: x, adjoint)


def _with(placements: Sequence[Placement], mesh_dim: int, after: Placement) -> list[Placement]:
    return [after if d == mesh_dim else p for d, p in enumerate(placements)]


def _dims(p: Placement) -> set[int]:
    return {p.dim} if isinstance(p, Shard) else set()


def _is_extremum(p: Placement) -> bool:
    return isinstance(p, Partial) and p.reduce_op != "sum"


def _dual(p: Placement) -> Placement:
    return Replicate() if isinstance(p, Partial) else p


@dataclass(frozen=True)
class _Move:
    """One step, ready to run."""

    forward: Mover
    adjoint: Mover
    again: Mover
    no_gradient: str


@lru_cache(maxsize=4096)
def _route(source: Layout, target: Layout) -> tuple[_Move, ...]:
    moves = []
    current = source
    for mesh_dim, before, after in redistribution_steps(source.placements, target.placements):
        grad_layout = current.replace([_dual(p) for p in current.placements])
        moves.append(
            _Move(
                _mover(current, mesh_dim, before, after),
                _mover(grad_layout, mesh_dim, _dual(after), _dual(before)),
                _mover(grad_layout, mesh_dim, _dual(before), _dual(after)),
                f"{before} -> {after}" if _is_extremum(before) or _is_extremum(after) else "",
            )
        )
        current = current.replace(_with(current.placements, mesh_dim, after))
    return tuple(moves)


def _mover(current: Layout, mesh_dim: int, before: Placement, after: Placement) -> Mover:
    """The step of one mesh dim as a function of the local tensor; all sizes are settled here."""
    platform, group = get_platform(), current.mesh.get_group(mesh_dim)
    # size of a tensor dim as this mesh dim's group sees it: cut by the other mesh dims only
    without = current.replace(_with(current.placements, mesh_dim, Replicate())).local_shape

    def ranges(p: Shard) -> tuple[Range, ...]:
        return chunk_ranges(without[p.dim], group.size)

    def sizes(p: Shard) -> list[int]:
        return [hi - lo for lo, hi in ranges(p)]

    if before == after:
        return lambda x: x
    if isinstance(before, Shard) and isinstance(after, Replicate):
        dim, parts = before.dim, sizes(before)
        return lambda x: platform.all_gather_uneven(x, dim, parts, group)
    if isinstance(before, Shard) and isinstance(after, Shard):
        return _exchange(group, before.dim, sizes(before), after.dim, ranges(after), without)
    if isinstance(before, Shard) and not _is_extremum(after):
        dim, own = before.dim, ranges(before)[group.rank]
        return lambda x: _pad(x, dim, without, own)
    if isinstance(before, Replicate) and isinstance(after, Shard):
        return _slice(after.dim, ranges(after)[group.rank])
    if isinstance(before, Replicate):
        if group.rank == 0 or _is_extremum(after):
            return lambda x: x
        return lambda x: platform.zeros(platform.shape(x), x)
    if isinstance(before, Partial) and isinstance(after, Replicate):
        op = before.reduce_op
        return lambda x: platform.all_reduce(x, op, group)
    if before == Partial() and isinstance(after, Shard):
        dim, parts = after.dim, sizes(after)
        return lambda x: platform.reduce_scatter_uneven(x, dim, parts, group)
    if isinstance(before, Partial):  # there is no reduce-scatter of extrema; one Partial to another
        reduce = _mover(current, mesh_dim, before, Replicate())
        rest = _mover(current, mesh_dim, Replicate(), after)
        return lambda x: rest(reduce(x))
    raise ValueError(f"cannot turn {before} into {after}; redistribute to Replicate first")


def _slice(dim: int, own: Range) -> Mover:
    platform, (lo, hi) = get_platform(), own
    return lambda x: platform.narrow(x, dim, lo, hi - lo)


def _exchange(
    group: Group, old_dim: int, old_sizes: list[int], new_dim: int, new_ranges: tuple[Range, ...], without: Shape
) -> Mover:
    """All-to-all: every member sends its piece of the new dim, and receives pieces of the old one."""
    platform = get_platform()
    own = new_ranges[group.rank][1] - new_ranges[group.rank][0]
    shapes = [
        tuple(size if d == old_dim else own if d == new_dim else w for d, w in enumerate(without))
        for size in old_sizes
    ]

    def move(x: Tensor) -> Tensor:
        chunks = [platform.narrow(x, new_dim, lo, hi - lo) for lo, hi in new_ranges]
        return platform.cat(platform.all_to_all_uneven(chunks, shapes, group), old_dim)

    return move


def _pad(x: Tensor, dim: int, shape: tuple[int, ...], own: tuple[int, int]) -> Tensor:
    platform = get_platform()
    before = platform.zeros((*shape[:dim], own[0], *shape[dim + 1 :]), x)
    behind = platform.zeros((*shape[:dim], shape[dim] - own[1], *shape[dim + 1 :]), x)
    return platform.cat([before, x, behind], dim)
