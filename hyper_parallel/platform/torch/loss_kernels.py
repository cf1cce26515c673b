"""Class-sharded log-softmax and cross-entropy in PyTorch, as ``platform/loss_kernels.py`` describes them.

Everything walks over the logits in chunks of rows (``_loss_rows``); a chunk's softmax gives a row's
statistics in the forward (``_loss_statistics``) and, taken again in the backward, its gradient
(``_loss_gradients``). ``_loss_forward`` puts them together, ``_loss_nodes`` under autograd.
"""

from __future__ import annotations

import torch

from hyper_parallel.platform.loss_kernels import ClassShard, LossKernels, LossOptions, TokenOutputs
from hyper_parallel.platform.torch._loss_facts import TorchFactReader, exchange_headers
from hyper_parallel.platform.torch._loss_forward import (
    distributed_log_softmax,
    distributed_nll_loss_forward,
    fused_nll_log_softmax_backward,
)
from hyper_parallel.platform.torch._loss_nodes import CrossEntropy, LogSoftmax, NllLoss
from hyper_parallel.platform.torch._loss_rows import statistics_dtype
from hyper_parallel.platform.torch._sole_holder import on_the_graph_of

__all__ = [
    "TorchLossKernels",
    "distributed_log_softmax",
    "distributed_nll_loss_forward",
    "fused_nll_log_softmax_backward",
]


class TorchLossKernels(LossKernels):
    """The kernels on any device of PyTorch, under autograd."""

    def log_softmax(
        self,
        local_logits: torch.Tensor,
        dim: int,
        shard: ClassShard,
        *,
        dtype: torch.dtype | None = None,
        validate: bool | None = None,
    ) -> torch.Tensor:
        self._ensure_valid(
            "log_softmax", local_logits, dim, None, shard, None, LossOptions(validate=validate)
        )
        if dtype is None and torch.is_autocast_enabled(local_logits.device.type):
            dtype = statistics_dtype(local_logits)  # what autocast does with log_softmax
        if dtype == torch.float64:  # PyTorch casts first, so the statistics have that precision as well
            local_logits = local_logits.to(dtype)
        return LogSoftmax.apply(local_logits, dim, shard, dtype)

    def token_outputs(
        self,
        local_logits: torch.Tensor,
        dim: int,
        target: torch.Tensor,
        shard: ClassShard,
        weight: torch.Tensor | None,
        options: LossOptions,
    ) -> TokenOutputs:
        self._ensure_valid("cross_entropy", local_logits, dim, target, shard, weight, options)
        tie = on_the_graph_of(local_logits, dim)
        return TokenOutputs(*CrossEntropy.apply(local_logits, tie, dim, target, shard, weight, options))

    def nll_loss(
        self,
        local_log_probs: torch.Tensor,
        dim: int,
        target: torch.Tensor,
        shard: ClassShard,
        weight: torch.Tensor | None,
        options: LossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._ensure_valid("nll_loss", local_log_probs, dim, target, shard, weight, options)
        return NllLoss.apply(local_log_probs, dim, target, shard, weight, options)

    distributed_log_softmax = staticmethod(distributed_log_softmax)  # type: ignore[assignment]
    distributed_nll_loss_forward = staticmethod(distributed_nll_loss_forward)  # type: ignore[assignment]
    fused_nll_log_softmax_backward = staticmethod(fused_nll_log_softmax_backward)  # type: ignore[assignment]

    _facts = TorchFactReader()
    _exchange_headers = staticmethod(exchange_headers)  # type: ignore[assignment]

    def validates_by_default(self, local_logits: torch.Tensor) -> bool:
        return local_logits.device.type == "cpu"
