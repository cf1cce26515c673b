"""The gradient's norm over all ranks, and clipping by it: the number that one device would find."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Parameter, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.alike import raise_alike
from hyper_parallel.tensor_parallel.cuts import owned_ranges
from hyper_parallel.tensor_parallel.data_shards import data_piece, held_rows, local_part

__all__ = ["clip_grad_norm_", "total_norm"]


def clip_grad_norm_(
    parameters: Parameter | Iterable[Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    gradients: Sequence[Tensor | None] | Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``. Signature as in PyTorch.

    Takes parameters that ranks share, whole ones, tied ones, heads held by several ranks, and those that FSDP2 has
    sharded over data-parallel ranks, together; each element of the whole model counts once, so the norm is that of
    one device, and the same on every rank.

    Args:
        parameters: those of this rank; parameters without a gradient are left out.
        max_norm: the largest norm to keep.
        norm_type: the order, ``inf`` included.
        error_if_nonfinite: raise when the norm is infinite or NaN; otherwise it scales the gradients as in
            PyTorch.
        gradients: where they are not kept on the parameters, as on MindSpore: what ``value_and_grad`` gives for the
            same parameters in the same order. Another order is an error where it shows in the shapes. Where it does
            not, only names can tell: a mapping of parameter names to gradients, which is ``dict(grads)`` of what
            ``value_and_grad(..., return_ids=True)`` gives, may be in any order.

    Returns:
        The norm before scaling, a scalar of at least fp32.

    Raises:
        RuntimeError: ``error_if_nonfinite``; on every rank.
        TypeError, ValueError: gradients that are no tensors or do not fit the parameters, by number, shape or name; or
            other settings on other ranks. On CPU on all ranks that share parameters, on accelerators where it is found.

    Collectives: one of a scalar for each group that shares parameters, and for each that FSDP2 shards over, and on CPU
    an all-gather of 16 bytes before it; none without such a group.

    Example:
        >>> norm = clip_grad_norm_(model.parameters(), 1.0)                          # doctest: +SKIP
        >>> norm = clip_grad_norm_(parameters, 1.0, gradients=grads)                 # doctest: +SKIP
    """
    backend, platform = get_module_backend(), get_platform()
    listed = [parameters] if platform.is_tensor(parameters) else list(parameters)
    order, limit, found = _agreed(listed, norm_type, gradients, max_norm, error_if_nonfinite)
    norm = _norm(listed, order, found)
    if norm is None:
        return platform.from_numpy(np.zeros((), np.float32))
    if error_if_nonfinite and not math.isfinite(float(platform.to_numpy(norm))):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(platform.to_numpy(norm))}, so they cannot "
            "be clipped; pass error_if_nonfinite=False to scale them by it all the same"
        )
    factor = backend.clip_factor(norm, limit)
    distinct = {id(g): local_part(g) for g in found if g is not None}
    backend.scale_gradients(list(distinct.values()), factor)
    return norm


def total_norm(
    parameters: Sequence[Parameter],
    norm_type: float = 2.0,
    *,
    gradients: Sequence[Tensor | None] | None = None,
) -> Tensor | None:
    """The norm of the gradients of all ranks together, each element of the whole model once; None without
    parameters.

    Collectives: as in :func:`clip_grad_norm_`.

    Raises:
        TypeError: a gradient that is no tensor.
        ValueError: another number of gradients than of parameters, or of other shapes, an order that is not positive, a
            cut parameter without its group, or a distributed tensor of the framework that is not sharded as FSDP2 does.
    """
    order, _, found = _agreed(parameters, norm_type, gradients)
    return _norm(parameters, order, found)


def _agreed(
    parameters: Sequence[Parameter],
    norm_type: float,
    gradients: Sequence[Tensor | None] | Mapping[str, Tensor] | None,
    max_norm: float = math.inf,
    error_if_nonfinite: bool = False,
) -> tuple[float, float, list[Tensor | None]]:
    """The order, the largest norm, and a gradient or None for each parameter; or an error on all ranks."""
    order, limit = math.nan, math.nan
    found: list[Tensor | None] = []
    error: Exception | None = None
    try:
        order, limit = float(norm_type), float(max_norm)
        if not order > 0:
            raise ValueError(f"norm_type must be positive, found {norm_type}")
        found = _gradients_of(parameters, gradients)
    except Exception as e:  # whatever it is, those who share parameters with this rank must hear of it
        error = e
    settings = f"max_norm={limit}, norm_type={order}, error_if_nonfinite={bool(error_if_nonfinite)}"
    groups = _groups(parameters)
    if groups:
        raise_alike(error, settings, "the same everywhere", groups, local_part(parameters[0]), "clip_grad_norm_")
    elif error is not None:
        raise error
    return order, limit, found


def _gradients_of(
    parameters: Sequence[Parameter], gradients: Sequence[Tensor | None] | Mapping[str, Tensor] | None
) -> list[Tensor | None]:
    if gradients is None:
        return [get_module_backend().gradient(p) for p in parameters]
    if isinstance(gradients, Mapping):
        return _by_name(parameters, gradients)
    if len(gradients) != len(parameters):
        raise ValueError(f"{len(gradients)} gradients for {len(parameters)} parameters")
    _check_gradients(parameters, gradients)
    return list(gradients)


def _groups(parameters: Sequence[Parameter]) -> list[Group]:
    """Of several ranks: those that share parameters, then those that FSDP2 shards over, as the parameters name them."""
    shared = [getattr(parameter, "_shard_group", None) for parameter in parameters]
    groups = {group.ranks: group for group in (*shared, *_by_data_group(parameters)) if group is not None}
    return [group for group in groups.values() if group.size > 1]


def _norm(parameters: Sequence[Parameter], order: float, found: Sequence[Tensor | None]) -> Tensor | None:
    backend = get_module_backend()
    if not parameters:
        return None
    like = local_part(next((g for g in found if g is not None), parameters[0]))
    parts: list[Tensor] = []
    for group, indices in _by_data_group(parameters).items():
        shares = _share_out([parameters[i] for i in indices], [found[i] for i in indices])
        sums = [_over_group(backend.power_sum(share.counted, order, like), share.group, order) for share in shares]
        parts += [_over_group(part, group, order) for part in sums]
    if math.isinf(order):
        return backend.power_sum(parts, order, like)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return backend.root(total, order)


def _by_name(parameters: Sequence[Parameter], gradients: Mapping[str, Tensor]) -> list[Tensor | None]:
    """One for each parameter, None for those that are not named."""
    names: list[str] = []
    owners: dict[str, Parameter] = {}
    for parameter in parameters:
        name = get_module_backend().parameter_name(parameter)
        if name is None:
            raise ValueError("gradients by name were given, but these parameters have no names; give them in order")
        if owners.setdefault(name, parameter) is not parameter:
            raise ValueError(f"gradients by name were given, but two parameters are called {name!r}")
        names.append(name)
    if unknown := sorted(gradients.keys() - owners.keys()):
        raise ValueError(f"gradients of {unknown}, which are no names of the parameters; expected some of {[*owners]}")
    found = [gradients.get(name) for name in names]
    _check_gradients(parameters, found)
    return found


def _check_gradients(parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    platform = get_platform()
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients)):
        if gradient is None:
            continue
        if not platform.is_tensor(gradient):
            raise TypeError(f"gradient {index} is a {type(gradient).__name__}; expected a tensor or None")
        found, expected = platform.shape(local_part(gradient)), platform.shape(local_part(parameter))
        if found != expected:
            raise ValueError(
                f"gradient {index} has shape {found}, its parameter {expected}; expected the gradients in the order of "
                "the parameters"
            )


def _over_group(part: Tensor, group: Group | None, order: float) -> Tensor:
    platform = get_platform()
    if group is None or group.size == 1:
        return part
    if math.isinf(order):  # gathered, because a reduction by maximum may lose a NaN
        return get_module_backend().power_sum([platform.all_gather(part, group)], order, part)
    return platform.all_reduce(part, "sum", group)


@dataclass
class _Share:
    """The parameters of one group, and the pieces of their gradients that this rank counts."""

    group: Group | None
    counted: list[Tensor] = field(default_factory=list)


def _by_data_group(parameters: Sequence[Parameter]) -> dict[Group | None, list[int]]:
    """Indices of the parameters by the ranks that FSDP2 shards them over; those that it does not are under None."""
    groups: dict[tuple[int, ...], Group] = {}
    indices: dict[Group | None, list[int]] = {}
    for index, parameter in enumerate(parameters):
        piece = data_piece(parameter)
        group = None if piece is None else groups.setdefault(piece.group.ranks, piece.group)
        indices.setdefault(group, []).append(index)
    return indices


def _share_out(parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> list[_Share]:
    """Whole parameters are counted by the first rank of the first group, so that all ranks get one and the
    same sum.
    """
    by_ranks: dict[tuple[int, ...], _Share] = {}
    whole: list[Tensor] = []
    seen: set[int] = set()
    for parameter, gradient in zip(parameters, gradients):
        if id(parameter) in seen:  # tied
            continue
        seen.add(id(parameter))
        spec: ShardSpec | None = getattr(parameter, "_shard_spec", None)
        group: Group | None = getattr(parameter, "_shard_group", None)
        if spec is not None and spec.dim is not None and group is None:
            raise ValueError(f"a parameter cut as {spec} does not say over which ranks (_shard_group)")
        if spec is None or group is None:
            whole += [] if gradient is None else [local_part(gradient)]
            continue
        # also without a gradient: all ranks must see the same groups
        share = by_ranks.setdefault(group.ranks, _Share(group))
        if gradient is None:
            continue
        local = local_part(gradient)
        if spec.dim is None:
            share.counted += [local] if group.rank == 0 else []
        else:
            held = held_rows(parameter, spec.dim)
            ranges = owned_ranges(spec, group.rank)
            share.counted += _pieces(local, spec.dim, ranges, held)
    shares = list(by_ranks.values()) or [_Share(None)]
    if shares[0].group is None or shares[0].group.rank == 0:
        shares[0].counted += whole
    return shares


def _pieces(
    local: Tensor, dim: int, ranges: Sequence[tuple[int, int]], held: tuple[int, int] | None
) -> list[Tensor]:
    """What of ``ranges`` along ``dim`` lies in a tensor that begins at ``held[0]``; None: it is all there."""
    platform = get_platform()
    if held is not None:
        ranges = [(max(start, held[0]) - held[0], min(stop, held[1]) - held[0]) for start, stop in ranges]
    if sum(max(stop - start, 0) for start, stop in ranges) == platform.shape(local)[dim]:
        return [local]  # all of it; MindSpore would make a copy
    return [platform.narrow(local, dim, start, stop - start) for start, stop in ranges if stop > start]
