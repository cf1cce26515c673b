"""The losses called by name in PyTorch."""

from __future__ import annotations

import torch

from hyper_parallel.platform.functional import LinearLoss, LossFunctions, SettleShard
from hyper_parallel.platform.loss_kernels import LossOptions, TokenOutputs
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch import _linear_ops as linear_ops
from hyper_parallel.platform.torch import _loss_ops as loss_ops
from hyper_parallel.platform.torch._largest import largest
from hyper_parallel.platform.torch._linear_loss import linear_loss

__all__ = ["TorchLossFunctions", "create_loss_functions"]


def create_loss_functions() -> LossFunctions:
    """Build them."""
    return TorchLossFunctions()


class TorchLossFunctions(LossFunctions):
    """On any device; under ``torch.compile`` as operators that the compiler does not look into."""

    def token_outputs(
        self,
        local_logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        group: Group | None,
        num_classes: int | None,
        options: LossOptions,
        settle: SettleShard,
    ) -> TokenOutputs:
        if torch.compiler.is_compiling():
            return loss_ops.token_outputs(local_logits, target, weight, group, num_classes, options)
        return super().token_outputs(local_logits, target, weight, group, num_classes, options, settle)

    def compiling(self) -> bool:
        return torch.compiler.is_compiling()

    def linear_loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        loss: LinearLoss,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return linear_ops.linear_loss(hidden, weight, bias, target, loss)
        return linear_loss(hidden, weight, bias, target, loss)

    def largest(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return largest(x, k)

    def take(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, index)
