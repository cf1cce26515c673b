"""The facts of a loss call, read from MindSpore tensors, and the exchange of the ranks' headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from hyper_parallel.platform.call_check import CallFacts
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore._host import as_float32, to_host
from hyper_parallel.platform.mindspore.custom_grad import requires_grad
from hyper_parallel.platform.platform import Group

__all__ = ["describe", "exchange_headers", "read_values"]


def describe(
    kind: str,
    local_logits: Tensor,
    dim: int,
    target: Tensor | None,
    shard: ClassShard,
    weight: Tensor | None,
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
        weight_requires_grad=isinstance(weight, Tensor) and requires_grad(weight),
        same_device=all(x.device == local_logits.device for x in (target, weight) if isinstance(x, Tensor)),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        inplace=options.inplace,
        logits_are_leaf=bool(local_logits._is_leaf) and requires_grad(local_logits),
    )


def read_values(facts: CallFacts, target: Tensor | None, weight: Tensor | None) -> CallFacts:
    """Add what the values of target and weight tell."""
    if target is not None:
        labels = to_host(target).reshape(-1).astype(np.int64)
        bad = labels[((labels < 0) | (labels >= facts.num_classes)) & (labels != facts.ignore_index)]
        facts = replace(
            facts,
            target_digest=_digest(labels),
            bad_targets=len(bad),
            first_bad_target=int(bad[0]) if len(bad) else 0,
        )
    if weight is not None:
        values = as_float32(to_host(weight)).astype(np.float64)
        facts = replace(facts, weight_digest=_digest(values.view(np.int64)))
    return facts


def exchange_headers(header: Sequence[int], group: Group, like: Tensor) -> list[list[int]]:
    """All-gather int64 values."""
    gathered = collectives.all_gather(Tensor(np.array(header, np.int64)), group)
    rows: list[list[int]] = to_host(gathered).tolist()
    return rows


def _digest(values: NDArray[Any]) -> int:
    """A 64-bit number that (as good as always) tells two vectors of int64 apart, also by their order."""
    position = np.arange(values.size, dtype=np.uint64)
    mixed = values.astype(np.int64).view(np.uint64) + position * np.uint64(0x632BE59BD9B4E019)  # wraps around
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return int((mixed ^ (mixed >> np.uint64(32))).sum(dtype=np.uint64))


def _dtype_name(x: Tensor | None) -> str:
    if x is None:
        return ""
    return str(x.dtype).lower() if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _shape(x: Tensor | None) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else ()
