"""Where each token's target stands among this rank's classes, and reading and writing there."""

from __future__ import annotations

import torch

from hyper_parallel.platform.loss_kernels import ClassShard
from hyper_parallel.platform.loss_statistics import ELSEWHERE, IGNORED
from hyper_parallel.platform.torch._loss_rows import matrices, statistics_dtype

__all__ = ["at_index", "place_targets", "put_at_index", "target_owner"]


def place_targets(
    labels: torch.Tensor,
    shard: ClassShard,
    weight: torch.Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each target's class is among the local ones (int32), and ``w_y``, 0 where ignored."""
    ignored = labels == ignore_index
    here = (labels >= shard.start) & (labels < shard.stop)
    index = torch.where(here, labels - shard.start, ELSEWHERE)
    index = torch.where(ignored, IGNORED, index).to(torch.int32)
    if weight is None:
        token_weight = (~ignored).to(dtype)
    else:
        picked = weight[labels.clamp(0, max(shard.num_classes - 1, 0))].to(dtype)
        token_weight = torch.where(ignored, 0.0, picked)
    return index, token_weight


def at_index(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Per token ``x`` at its class ``index``, in the statistics' dtype; 0 where that is negative."""
    out = torch.zeros(index.shape, dtype=statistics_dtype(x), device=x.device)
    for start, (rows,) in matrices(dim, x):
        part = index[start : start + rows.shape[0]]
        values = rows.gather(1, part.clamp(min=0).long()[:, None]).squeeze(1).to(out.dtype)
        out[start : start + rows.shape[0]] = torch.where(part >= 0, values, 0.0)
    return out


def put_at_index(x: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor) -> None:
    """Per token, set ``x`` at class ``index`` to ``values``, where that is not negative."""
    for start, (rows,) in matrices(dim, x):
        part = index[start : start + rows.shape[0]]
        at = (torch.arange(rows.shape[0], device=x.device), part.clamp(min=0).long())
        new = values[start : start + rows.shape[0]].to(x.dtype)
        # a token without a value is written back as it was: picking the others out would synchronise a device
        rows[at] = torch.where(part >= 0, new, rows[at])


def target_owner(labels: torch.Tensor, shard: ClassShard) -> torch.Tensor | None:
    """Per token the member of the class group that holds the target's class, -1 for none; None where not known."""
    if shard.ranges is None:
        return None
    stops = torch.tensor([stop for _, stop in shard.ranges], device=labels.device)
    owner = torch.bucketize(labels, stops, right=True)
    return torch.where((labels >= 0) & (labels < shard.num_classes), owner, -1)
