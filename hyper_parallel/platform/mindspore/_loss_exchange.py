"""The ranks' statistics of each token, merged in one collective, or two in large groups; see ``loss_statistics``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.platform import loss_statistics as statistics
from hyper_parallel.platform.loss_statistics import LARGEST_GAP, Strategy, choose_strategy
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.platform import Group

__all__ = ["MergedStatistics", "Received", "ShardStatistics", "merge_statistics", "start_exchange"]

Vector = Any
"""One number a token: a NumPy array or a tensor, as the route has it."""

ShardStatistics = statistics.ShardStatistics[Any]
MergedStatistics = statistics.MergedStatistics[Any]

Received = tuple[list[Vector], Vector | None]
"""From the first collective: each of the vectors, ``[P, tokens]``, or the ranks' largest references alone; with
smoothing the ranks' weight sums ``[P, 1]``."""


def merge_statistics(
    route: Any,
    local: ShardStatistics,
    group: Group | None,
    *,
    owner: np.ndarray | None = None,
    strategy: Strategy | None = None,
    received: Received | None = None,
) -> MergedStatistics:
    """Merge the ranks' statistics; bitwise equal results on all of them.

    ``"gather"`` runs one all-gather and merges in rank order, as online softmax does: of 8 bytes a token (fp64: 16) for
    the plain loss with ``owner``, else of 4 bytes for each vector that ``local`` has. ``"reduce"`` runs an all-reduce
    of the maxima, then one of everything else, rescaled and packed; it sends less in large groups.

    Args:
        owner: per token the member that holds the target's class, negative for none; on the host only.
        strategy: default: by the size of the group and of what it would gather.
        received: what :func:`start_exchange` brought of these tokens; None: it is done here.
    """
    if group is None or group.size == 1:
        return _merge_gathered(route, local, *_unpack(local, _pack(route, local)[None]))
    if strategy is None:
        strategy = choose_strategy(group.size, local.nbytes)
    if strategy == "reduce":
        if received is None:
            received = [route.enter(collectives.all_reduce(route.leave(local.reference), "max", group))], None
        return _merge_reduced(route, local, group, received[0][0])
    if owner is not None and local.is_plain:
        merged = _merge_relative_to_target(route, local, group, owner)
        if merged is not None:
            return merged
    if received is None:
        received = _unpack(local, route.enter(collectives.all_gather(route.leave(_pack(route, local)), group)))
    return _merge_gathered(route, local, *received)


def start_exchange(route: Any, local: ShardStatistics, group: Group, strategy: Strategy) -> Callable[[], Received]:
    """Start the first collective of :func:`merge_statistics`, without ``owner``; calling the result waits for it."""
    if strategy == "reduce":
        largest = collectives.start_all_reduce(collectives.copy(route.leave(local.reference)), "max", group)
        return lambda: ([route.enter(largest())], None)
    gathered = collectives.start_all_gather(route.leave(_pack(route, local)), group)
    return lambda: _unpack(local, route.enter(gathered()))


def _merge_relative_to_target(
    route: Any, local: ShardStatistics, group: Group, owner: np.ndarray
) -> MergedStatistics | None:
    """Two numbers a token; None, on all ranks, when some ``lse_local - x_y`` is too large for that."""
    assert local.target_logit is not None
    mine = owner == group.rank
    own_reference = np.where(mine, local.target_logit, local.reference)
    gap = np.where(mine, local.reference - local.target_logit, 0)
    sent = np.stack([own_reference, gap + np.log(local.sum_exp)]).astype(local.reference.dtype)
    gathered = route.enter(collectives.all_gather(route.leave(sent), group))
    references, sums = gathered[:, 0], gathered[:, 1]
    at_owner = np.maximum(owner, 0)[None]
    at_target = np.take_along_axis(sums, at_owner, 0)[0]
    if not ((at_target <= LARGEST_GAP) | (owner < 0)).all():
        return None
    reference = np.take_along_axis(references, at_owner, 0)[0]
    members = np.arange(group.size)[:, None]
    relative = sums + np.where(members == owner, 0, references - reference)
    top = relative.max(0)
    log_sum_exp = top + np.log(np.exp(relative - top).sum(0))
    share = np.exp(relative[group.rank] - log_sum_exp)
    return MergedStatistics(reference, log_sum_exp, share, np.zeros_like(reference), None, None)


def _pack(route: Any, local: ShardStatistics) -> Vector:
    """One vector of all there is to send."""
    parts = [*local.vectors, local.weight_sum]
    return route.concat([part.reshape(-1) for part in parts if part is not None])


def _unpack(local: ShardStatistics, packed: Vector) -> Received:
    """What :func:`_pack` gave on each rank, ``[P, ...]``, as the vectors."""
    tokens = local.reference.shape[0]
    columns = [packed[:, i * tokens : (i + 1) * tokens] for i in range(len(local.vectors))]
    return columns, None if local.weight_sum is None else packed[:, -1:]


def _merge_gathered(
    route: Any, local: ShardStatistics, vectors: list[Vector], weights: Vector | None
) -> MergedStatistics:
    """Merge what :func:`_unpack` gives."""
    columns = iter(vectors)
    maxima, sums = next(columns), next(columns)
    maximum = route.largest(maxima)
    sum_exp = route.total(sums * route.exp(maxima - maximum))
    target_gap = None if local.target_logit is None else maximum - route.total(next(columns))
    mean = None
    if local.mean is not None:
        shares = sums * route.exp(maxima - maximum) / sum_exp
        mean = route.total(shares * (next(columns) + (_finite_or_zero(route, maxima) - maximum)))
    if weights is None:
        return _merged(route, local, maximum, sum_exp, target_gap, None, None, mean)
    shortfall = next(columns) + weights * (maximum - _finite_or_zero(route, maxima))
    return _merged(route, local, maximum, sum_exp, target_gap, route.total(shortfall), route.total(weights), mean)


def _merge_reduced(route: Any, local: ShardStatistics, group: Group, maximum: Vector) -> MergedStatistics:
    """Bring everything relative to the maximum, which was found first, and sum it."""
    terms = [local.sum_exp * route.exp(local.reference - maximum)]
    if local.target_logit is not None:
        terms.append(local.target_logit)
    if local.mean is not None:
        terms.append(terms[0] * (local.mean + (_finite_or_zero(route, local.reference) - maximum)))
    if local.shortfall is not None and local.weight_sum is not None:
        terms += [
            local.shortfall + local.weight_sum * (maximum - _finite_or_zero(route, local.reference)),
            local.weight_sum.reshape(1),
        ]
    packed = route.enter(collectives.all_reduce(route.leave(route.concat(terms)), "sum", group))
    tokens = maximum.shape[0]
    sums = iter([packed[i * tokens : (i + 1) * tokens] for i in range(len(terms))])
    sum_exp = next(sums)
    target_gap = None if local.target_logit is None else maximum - next(sums)
    mean = None if local.mean is None else next(sums) / sum_exp
    if local.shortfall is None:
        return _merged(route, local, maximum, sum_exp, target_gap, None, None, mean)
    return _merged(route, local, maximum, sum_exp, target_gap, next(sums), packed[-1:], mean)


def _merged(
    route: Any,
    local: ShardStatistics,
    maximum: Vector,
    sum_exp: Vector,
    target_gap: Vector | None,
    shortfall: Vector | None,
    weight_sum: Vector | None,
    mean: Vector | None,
) -> MergedStatistics:
    share = local.sum_exp * route.exp(local.reference - maximum) / sum_exp
    return MergedStatistics(maximum, route.log(sum_exp), share, target_gap, shortfall, weight_sum, mean)


def _finite_or_zero(route: Any, maximum: Vector) -> Vector:
    """The maximum, or 0 where there is no class or nothing but -inf: a point that can be subtracted from."""
    return route.where(maximum == -math.inf, 0.0, maximum)
