"""The facts of a loss call, read from PyTorch tensors, and the exchange of the ranks' headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hyper_parallel.platform.call_check import CallFacts
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch.collectives import all_gather

__all__ = ["describe", "exchange_headers", "read_values"]


def describe(
    kind: str,
    local_logits: torch.Tensor,
    dim: int,
    target: torch.Tensor | None,
    shard: ClassShard,
    weight: torch.Tensor | None,
    options: LossOptions,
) -> CallFacts:
    """What shapes, dtypes and options tell, without looking at a value."""
    return CallFacts(
        kind=kind,
        description=options.description,
        dim=dim,
        logits_shape=tuple(local_logits.shape),
        logits_dtype=_dtype_name(local_logits),
        start=shard.start,
        stop=shard.stop,
        num_classes=shard.num_classes,
        target_shape=_shape(target),
        target_dtype=_dtype_name(target),
        weight_shape=_shape(weight),
        weight_dtype=_dtype_name(weight),
        weight_requires_grad=isinstance(weight, torch.Tensor) and weight.requires_grad and torch.is_grad_enabled(),
        same_device=all(
            x.device == local_logits.device for x in (target, weight) if isinstance(x, torch.Tensor)
        ),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        inplace=options.inplace,
        logits_are_leaf=local_logits.is_leaf and local_logits.requires_grad,
    )


def read_values(facts: CallFacts, target: torch.Tensor | None, weight: torch.Tensor | None) -> CallFacts:
    """Add what the values of target and weight tell."""
    if target is not None:
        labels = target.detach().reshape(-1).long()
        bad = ((labels < 0) | (labels >= facts.num_classes)) & (labels != facts.ignore_index)
        count = int(bad.sum())
        facts = replace(
            facts,
            target_digest=_digest(labels),
            bad_targets=count,
            first_bad_target=int(labels[bad][0]) if count else 0,
        )
    if weight is not None:
        facts = replace(facts, weight_digest=_digest(weight.detach().double().view(torch.int64)))
    return facts


def exchange_headers(header: Sequence[int], group: Group, like: torch.Tensor) -> list[list[int]]:
    """All-gather int64 values on the device of ``like``."""
    gathered = all_gather(torch.tensor(header, dtype=torch.int64, device=like.device), group)
    return gathered.tolist()  # type: ignore[no-any-return]


def _digest(values: torch.Tensor) -> int:
    """A 64-bit number that (as good as always) tells two vectors of int64 apart, also by their order."""
    position = torch.arange(values.numel(), device=values.device)
    mixed = (values + position * 0x632BE59BD9B4E019) * 0x1E3779B97F4A7C15  # wraps around
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return int((mixed ^ (mixed >> 32)).sum())


def _dtype_name(x: torch.Tensor | None) -> str:
    if x is None:
        return ""
    return str(x.dtype).removeprefix("torch.") if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def _shape(x: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else ()
