"""The gradient's norm over all ranks, and clipping by it: the number that one device would find."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Parameter, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.cuts import owned_ranges

__all__ = ["clip_grad_norm_", "total_norm"]


def clip_grad_norm_(
    parameters: Parameter | Iterable[Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    gradients: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``. Signature as in PyTorch.

    Takes parameters that ranks share, whole ones, tied ones and heads held by several ranks together; each
    element of the whole model counts once, so the norm is that of one device, and the same on every rank.

    Args:
        parameters: those of this rank; parameters without a gradient are left out.
        max_norm: the largest norm to keep.
        norm_type: the order, ``inf`` included.
        error_if_nonfinite: raise when the norm is infinite or NaN; otherwise it scales the gradients as in
            PyTorch.
        gradients: one for each parameter, for backends that do not keep gradients on them.

    Returns:
        The norm before scaling, a scalar of at least fp32.

    Raises:
        RuntimeError: ``error_if_nonfinite``; on every rank.

    Collectives: one of a scalar for each group that shares parameters; none without such a group.

    Example:
        >>> norm = clip_grad_norm_(model.parameters(), 1.0)                          # doctest: +SKIP
    """
    backend, platform = get_module_backend(), get_platform()
    listed = [parameters] if platform.is_tensor(parameters) else list(parameters)
    norm = total_norm(listed, norm_type, gradients=gradients)
    if norm is None:
        return platform.from_numpy(np.zeros((), np.float32))
    if error_if_nonfinite and not math.isfinite(float(platform.to_numpy(norm))):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(platform.to_numpy(norm))}, so they cannot "
            "be clipped; pass error_if_nonfinite=False to scale them by it all the same"
        )
    factor = backend.at_most_one(float(max_norm) / (norm + 1e-6))
    found = gradients if gradients is not None else [backend.gradient(p) for p in listed]
    backend.scale_gradients(list({id(g): g for g in found if g is not None}.values()), factor)
    return norm


def total_norm(
    parameters: Sequence[Parameter],
    norm_type: float = 2.0,
    *,
    gradients: Sequence[Tensor | None] | None = None,
) -> Tensor | None:
    """The norm of the gradients of all ranks together, each element of the whole model once; None without
    parameters.

    Collectives: one of a scalar for each group that shares parameters.

    Raises:
        ValueError: another number of gradients than of parameters, an order that is not positive, a cut parameter
            without its group, or a distributed tensor of the framework.
    """
    backend = get_module_backend()
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be positive, found {norm_type}")
    if gradients is not None and len(gradients) != len(parameters):
        raise ValueError(f"{len(gradients)} gradients for {len(parameters)} parameters")
    if not parameters:
        return None
    found = gradients if gradients is not None else [backend.gradient(p) for p in parameters]
    shares = _share_out(parameters, found)
    like = next((g for g in found if g is not None), parameters[0])
    parts = [_over_group(backend.power_sum(share.counted, order, like), share.group, order) for share in shares]
    if math.isinf(order):
        return backend.power_sum(parts, order, like)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total ** (1.0 / order)


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
        if get_platform().is_native_dtensor(parameter):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is a distributed tensor of the framework (FSDP2 makes "
                "them), which does not say over which tensor-parallel ranks it is cut; expected plain parameters"
            )
        spec: ShardSpec | None = getattr(parameter, "_shard_spec", None)
        group: Group | None = getattr(parameter, "_shard_group", None)
        if spec is not None and spec.dim is not None and group is None:
            raise ValueError(f"a parameter cut as {spec} does not say over which ranks (_shard_group)")
        if spec is None or group is None:
            whole += [] if gradient is None else [gradient]
            continue
        # also without a gradient: all ranks must see the same groups
        share = by_ranks.setdefault(group.ranks, _Share(group))
        if gradient is None:
            continue
        if spec.dim is None:
            share.counted += [gradient] if group.rank == 0 else []
        else:
            narrow = get_platform().narrow
            ranges = owned_ranges(spec, group.rank)
            share.counted += [narrow(gradient, spec.dim, start, stop - start) for start, stop in ranges]
    shares = list(by_ranks.values()) or [_Share(None)]
    if shares[0].group is None or shares[0].group.rank == 0:
        shares[0].counted += whole
    return shares
