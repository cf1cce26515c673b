"""The last layer and its loss as one operation, without logits."""

from __future__ import annotations

from hyper_parallel.trainer.loss import HeadLoss

__all__ = ["LinearLoss"]


class LinearLoss(HeadLoss):
    pass
