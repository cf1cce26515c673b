"""The ranks' statistics of each token, merged in one collective, or two in large groups; see ``loss_statistics``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyper_parallel.platform import loss_statistics as statistics
from hyper_parallel.platform.loss_statistics import LARGEST_GAP, Strategy, choose_strategy
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch import collectives
from hyper_parallel.platform.torch._loss_statistics import ShardStatistics, finite_or_zero

__all__ = ["MergedStatistics", "Received", "merge_statistics", "start_exchange"]

MergedStatistics = statistics.MergedStatistics[torch.Tensor]

Received = tuple[torch.Tensor, torch.Tensor | None]
"""From the first collective: ``[P, vectors, tokens]``, or the ranks' largest references ``[tokens]``; with smoothing
the ranks' weight sums ``[P]``."""


def merge_statistics(
    local: ShardStatistics,
    group: Group | None,
    *,
    owner: torch.Tensor | None = None,
    strategy: Strategy | None = None,
    received: Received | None = None,
) -> MergedStatistics:
    """Merge the ranks' statistics; bitwise equal results on all of them.

    ``"gather"`` runs one all-gather and merges in rank order, as online softmax does: of 8 bytes a token (fp64: 16) for
    the plain loss with ``owner`` on CPU, else of 4 bytes for each vector that ``local`` has. ``"reduce"`` runs an
    all-reduce of the maxima, then one of everything else, rescaled and packed; it sends less in large groups.

    Args:
        owner: per token the member that holds the target's class, negative for none.
        strategy: default: by the size of the group and of what it would gather.
        received: what :func:`start_exchange` brought of these tokens; None: it is done here.
    """
    if group is None or group.size == 1:
        return _merge_gathered(local, *_unpack(local, _pack(local)[None]))
    if strategy is None:
        strategy = choose_strategy(group.size, local.nbytes)
    if received is None:
        message = _message(local, group, owner, strategy)
        if strategy == "reduce":
            received = collectives.all_reduce(message, "max", group), None
        else:
            received = _unpack(local, collectives.all_gather(message, group))
    if strategy == "reduce":
        return _merge_reduced(local, group, received[0])
    owner = _trusted(owner, local)
    if owner is not None:
        merged = _merge_relative_to_target(group, owner, received[0])
        if merged is not None:
            return merged
        received = _unpack(local, collectives.all_gather(_pack(local), group))
    return _merge_gathered(local, *received)


def start_exchange(
    local: ShardStatistics, group: Group, owner: torch.Tensor | None, strategy: Strategy
) -> Callable[[], Received]:
    """Start the first collective of :func:`merge_statistics` for some tokens; calling the result waits for it."""
    message = _message(local, group, owner, strategy)
    if strategy == "reduce":
        largest = collectives.start_all_reduce(message, "max", group)
        return lambda: (largest(), None)
    gathered = collectives.start_all_gather(message, group)
    return lambda: _unpack(local, gathered())


def _trusted(owner: torch.Tensor | None, local: ShardStatistics) -> torch.Tensor | None:
    """The owners where two numbers a token are tried; reading whether they do would synchronise an accelerator."""
    return owner if owner is not None and local.is_plain and owner.device.type == "cpu" else None


def _message(
    local: ShardStatistics, group: Group, owner: torch.Tensor | None, strategy: Strategy
) -> torch.Tensor:
    """What a rank sends first."""
    if strategy == "reduce":
        return local.reference
    owner = _trusted(owner, local)
    if owner is None:
        return _pack(local)
    assert local.target_logit is not None
    mine = owner == group.rank
    own_reference = torch.where(mine, local.target_logit, local.reference)
    gap = torch.where(mine, local.reference - local.target_logit, 0.0)
    return torch.stack([own_reference, gap + local.sum_exp.log()])


def _merge_relative_to_target(
    group: Group, owner: torch.Tensor, gathered: torch.Tensor
) -> MergedStatistics | None:
    """Two numbers a token; None, on all ranks, when some ``lse_local - x_y`` is too large for that."""
    references, sums = gathered.unbind(1)
    at_owner = owner.clamp(min=0)[None]
    if not bool(((sums.gather(0, at_owner)[0] <= LARGEST_GAP) | (owner < 0)).all()):
        return None
    reference = references.gather(0, at_owner)[0]
    members = torch.arange(group.size, device=owner.device)[:, None]
    relative = sums + torch.where(members == owner, 0.0, references - reference)
    top = relative.amax(0)
    log_sum_exp = top + (relative - top).exp().sum(0).log()
    share = torch.exp(relative[group.rank] - log_sum_exp)
    return MergedStatistics(reference, log_sum_exp, share, torch.zeros_like(reference), None, None)


def _pack(local: ShardStatistics) -> torch.Tensor:
    """One vector of all there is to send."""
    parts = [*local.vectors, local.weight_sum]
    return torch.cat([part.reshape(-1) for part in parts if part is not None])


def _unpack(local: ShardStatistics, gathered: torch.Tensor) -> Received:
    """The vectors in what was gathered of :func:`_message`."""
    if gathered.ndim == 3:
        return gathered, None
    count, tokens = len(local.vectors), local.reference.numel()
    vectors = gathered[:, : count * tokens].reshape(len(gathered), count, tokens)
    return vectors, None if local.weight_sum is None else gathered[:, -1]


def _merge_gathered(
    local: ShardStatistics, vectors: torch.Tensor, weight_sums: torch.Tensor | None
) -> MergedStatistics:
    """Merge what :func:`_unpack` gives."""
    columns = iter(vectors.unbind(1))
    maxima, sums = next(columns), next(columns)
    maximum = maxima.amax(0)
    sum_exp = (sums * torch.exp(maxima - maximum)).sum(0)
    target_gap = None if local.target_logit is None else maximum - next(columns).sum(0)
    mean = None
    if local.mean is not None:
        shares = sums * torch.exp(maxima - maximum) / sum_exp
        mean = (shares * (next(columns) + (finite_or_zero(maxima) - maximum))).sum(0)
    if weight_sums is None:
        return _merged(local, maximum, sum_exp, target_gap, None, None, mean)
    shortfall = next(columns) + weight_sums[:, None] * (maximum - finite_or_zero(maxima))
    return _merged(local, maximum, sum_exp, target_gap, shortfall.sum(0), weight_sums.sum(), mean)


def _merge_reduced(local: ShardStatistics, group: Group, maximum: torch.Tensor) -> MergedStatistics:
    """Bring everything relative to the maximum, which was found first, and sum it."""
    terms = [local.sum_exp * torch.exp(local.reference - maximum)]
    if local.target_logit is not None:
        terms.append(local.target_logit)
    if local.mean is not None:
        terms.append(terms[0] * (local.mean + (finite_or_zero(local.reference) - maximum)))
    if local.shortfall is not None and local.weight_sum is not None:
        terms += [
            local.shortfall + local.weight_sum * (maximum - finite_or_zero(local.reference)),
            local.weight_sum.reshape(1),
        ]
    packed = collectives.all_reduce(torch.cat(terms), "sum", group)
    sums = iter(packed.split([term.numel() for term in terms]))
    sum_exp = next(sums)
    target_gap = None if local.target_logit is None else maximum - next(sums)
    mean = None if local.mean is None else next(sums) / sum_exp
    if local.shortfall is None:
        return _merged(local, maximum, sum_exp, target_gap, None, None, mean)
    return _merged(local, maximum, sum_exp, target_gap, next(sums), next(sums)[0], mean)


def _merged(
    local: ShardStatistics,
    maximum: torch.Tensor,
    sum_exp: torch.Tensor,
    target_gap: torch.Tensor | None,
    shortfall: torch.Tensor | None,
    weight_sum: torch.Tensor | None,
    mean: torch.Tensor | None,
) -> MergedStatistics:
    share = local.sum_exp * torch.exp(local.reference - maximum) / sum_exp
    return MergedStatistics(maximum, sum_exp.log(), share, target_gap, shortfall, weight_sum, mean)
