"""From one placement to another, differentiably, on meshes of any number of dims.

Each step changes one mesh dim and is a linear map with an explicit adjoint. With the dual of a placement being the
placement of its gradient (Shard -> Shard, Replicate -> Replicate, Partial -> Replicate), the adjoint of ``p -> q`` is
``dual(q) -> dual(p)``:

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

from collections.abc import Sequence

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["redistribute_local", "reduce_gradient", "redistribution_steps"]

Step = tuple[int, Placement, Placement]


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
    current = source
    for mesh_dim, before, after in redistribution_steps(source.placements, target.placements):
        if _is_extremum(before) or _is_extremum(after):
            if platform.requires_grad(local):
                raise ValueError(f"{before} -> {after} on {source.describe()} has no gradient; detach the tensor first")
        local = _differentiable_step(local, current, mesh_dim, before, after)
        current = current.replace(_with(current.placements, mesh_dim, after))
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


def _differentiable_step(local: Tensor, current: Layout, mesh_dim: int, before: Placement, after: Placement) -> Tensor:
    def forward(x: Tensor) -> Tensor:
        return _step(x, current, mesh_dim, before, after)

    def adjoint(grad: Tensor) -> Tensor:
        grad_layout = current.replace([_dual(p) for p in current.placements])
        return _step(grad, grad_layout, mesh_dim, _dual(after), _dual(before))

    return get_platform().linear_map(local, forward, adjoint)


def _step(x: Tensor, current: Layout, mesh_dim: int, before: Placement, after: Placement) -> Tensor:
    if before == after:
        return x
    platform, group = get_platform(), current.mesh.get_group(mesh_dim)
    # size of a tensor dim as this mesh dim's group sees it: cut by the other mesh dims only
    without = current.replace(_with(current.placements, mesh_dim, Replicate())).local_shape

    def ranges(dim: int) -> tuple[tuple[int, int], ...]:
        return chunk_ranges(without[dim], group.size)

    def sizes(dim: int) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in ranges(dim))

    if isinstance(before, Shard):
        if isinstance(after, Replicate):
            return platform.all_gather_uneven(x, before.dim, sizes(before.dim), group)
        if isinstance(after, Shard):
            chunks = [platform.narrow(x, after.dim, lo, hi - lo) for lo, hi in ranges(after.dim)]
            own = sizes(after.dim)[group.rank]
            shapes = [
                tuple(s if d == before.dim else own if d == after.dim else w for d, w in enumerate(without))
                for s in sizes(before.dim)
            ]
            return platform.cat(platform.all_to_all_uneven(chunks, shapes, group), before.dim)
        if _is_extremum(after):
            raise ValueError(f"cannot turn {before} into {after}; redistribute to Replicate first")
        return _pad(x, before.dim, without, ranges(before.dim)[group.rank])
    if isinstance(before, Replicate):
        if isinstance(after, Shard):
            lo, hi = ranges(after.dim)[group.rank]
            return platform.narrow(x, after.dim, lo, hi - lo)
        if group.rank == 0 or _is_extremum(after):
            return x
        return platform.zeros(platform.shape(x), x)
    if isinstance(before, Partial):
        if isinstance(after, Replicate):
            return platform.all_reduce(x, before.reduce_op, group)
        if isinstance(after, Shard):
            if before.reduce_op == "sum":
                return platform.reduce_scatter_uneven(x, after.dim, sizes(after.dim), group)
            lo, hi = ranges(after.dim)[group.rank]
            return platform.narrow(platform.all_reduce(x, before.reduce_op, group), after.dim, lo, hi - lo)
        reduced = _step(x, current, mesh_dim, before, Replicate())
        return _step(reduced, current, mesh_dim, Replicate(), after)
    raise ValueError(f"cannot turn {before} into {after}")


def _pad(x: Tensor, dim: int, shape: tuple[int, ...], own: tuple[int, int]) -> Tensor:
    platform = get_platform()
    before = platform.zeros((*shape[:dim], own[0], *shape[dim + 1 :]), x)
    behind = platform.zeros((*shape[:dim], shape[dim] - own[1], *shape[dim + 1 :]), x)
    return platform.cat([before, x, behind], dim)
