"""How the kinds of parallel layers cut a tensor, as :class:`ShardSpec`: fused parts, heads, replicated
heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.shard_spec import Range, ShardSpec, chunk_ranges
from hyper_parallel.errors import ParallelPlanError

__all__ = ["cut_parts", "owned_ranges", "range_replicas", "unit_ranges"]


def unit_ranges(size: int, units: int, ranks: int) -> tuple[Range, ...]:
    """Ranges over ``size`` elements that are made of ``units`` indivisible ones (attention heads).

    As many units on every rank, or, when ranks outnumber them, each unit on ``ranks / units`` neighbouring
    ranks: rank ``r`` holds unit ``r // (ranks / units)``.

    Raises:
        ParallelPlanError: neither number divides the other, or ``units`` does not divide ``size``.

    Example:
        >>> unit_ranges(8, 2, 4)
        ((0, 4), (0, 4), (4, 8), (4, 8))
    """
    if units < 1 or size % units:
        raise ParallelPlanError(f"{size} elements cannot be made of {units} equal heads")
    width = size // units
    if units % ranks == 0:
        own = units // ranks
        return tuple((r * own * width, (r + 1) * own * width) for r in range(ranks))
    if ranks % units == 0:
        share = ranks // units
        return tuple((r // share * width, (r // share + 1) * width) for r in range(ranks))
    raise ParallelPlanError(
        f"{units} heads cannot be laid over {ranks} tensor-parallel ranks: expected {units} to be a multiple "
        f"of {ranks}, or {ranks} a multiple of {units}"
    )


def cut_parts(
    shape: Sequence[int], dim: int, parts: Sequence[int], units: Sequence[int | None], ranks: int
) -> ShardSpec:
    """Cut ``dim``, made of ``parts`` one after the other (fused q/k/v, gate/up), each part on its own.

    Args:
        shape: the whole tensor's shape.
        dim: the dim that is cut.
        parts: the sizes of the parts.
        units: for each part how many indivisible heads it is made of; None: it may be cut anywhere, as
            ``torch.chunk``.
        ranks: number of ranks.

    Raises:
        ParallelPlanError: the parts do not add up to the dim, or the heads do not fit the ranks.

    Example:
        >>> cut_parts((12, 1), 0, (8, 2, 2), (4, 1, 1), 2).ranges     # both ranks hold the key and value head
        (((0, 4), (8, 10), (10, 12)), ((4, 8), (8, 10), (10, 12)))
    """
    shape = tuple(shape)
    dim = dim % len(shape)
    if sum(parts) != shape[dim]:
        raise ParallelPlanError(
            f"parts {tuple(parts)} add up to {sum(parts)}, but dim {dim} of {shape} has {shape[dim]}"
        )
    if len(parts) != len(units):
        raise ParallelPlanError(
            f"{len(parts)} parts {tuple(parts)} with {len(units)} numbers of heads {tuple(units)}"
        )
    per_rank: list[list[Range]] = [[] for _ in range(ranks)]
    offset, replicated = 0, False
    for part, heads in zip(parts, units):
        ranges = chunk_ranges(part, ranks) if heads is None else unit_ranges(part, heads, ranks)
        replicated |= heads is not None and heads < ranks
        for own, (start, stop) in zip(per_rank, ranges):
            own.append((offset + start, offset + stop))
        offset += part
    return ShardSpec(shape, dim, tuple(tuple(own) for own in per_rank), sum_replica_gradients=replicated)


def range_replicas(spec: ShardSpec, rank: int) -> tuple[tuple[int, ...], ...]:
    """For each range that ``rank`` holds, the ranks that hold the same one, ``rank`` among them.

    Of a fused weight some parts may be replicated (key and value heads) and others not (query heads).
    """
    if spec.dim is None:
        return ()
    return tuple(
        tuple(r for r, ranges in enumerate(spec.ranges) if ranges[index] == own)
        for index, own in enumerate(spec.ranges[rank])
    )


def owned_ranges(spec: ShardSpec, rank: int) -> tuple[Range, ...]:
    """Local ranges along ``spec.dim`` that ``rank`` holds as the first of their replicas; norms count only
    these.

    Over all ranks they cover every element of the whole tensor once. For a tensor that is not cut, see
    :meth:`ShardSpec.owner`.
    """
    owned, offset = [], 0
    if spec.dim is None:
        return ()
    for (start, stop), replicas in zip(spec.ranges[rank], range_replicas(spec, rank)):
        length = stop - start
        if replicas[0] == rank and length:
            owned.append((offset, offset + length))
        offset += length
    return tuple(owned)
