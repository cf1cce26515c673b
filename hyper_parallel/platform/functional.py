"""What a backend owes the losses that are called by name (:mod:`hyper_parallel.loss_parallel.functional`)."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Group, Tensor

if TYPE_CHECKING:
    from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions, TokenOutputs

__all__ = ["LinearLoss", "LossFunctions", "SettleShard", "get_loss_functions"]

SettleShard = Callable[[Tensor, Tensor, "Tensor | None", "Group | None", "int | None", "LossOptions"], "ClassShard"]
"""``(logits, target, weight, group, num_classes, options)``: which classes this rank holds, the call once checked, by
all ranks together where the options say so; may run collectives."""


@dataclass(frozen=True)
class LinearLoss:
    """How :meth:`LossFunctions.linear_loss` computes.

    Attributes:
        shard: the classes of this rank's rows of the weight.
        options: of the loss.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``.
        softcap: ``logits = softcap * tanh(logits / softcap)``; None: as they are.
        chunk_size: tokens in a chunk; None: the backend's choice.
        sequence_dim: the dim of the hidden states that is cut over the ranks, as ``torch.chunk`` does; None: they are
            whole, and equal on all ranks.
    """

    shard: ClassShard
    options: LossOptions
    reduction: str
    softcap: float | None = None
    chunk_size: int | None = None
    sequence_dim: int | None = None


class LossFunctions(ABC):
    """Differentiable functions on plain local tensors."""

    def token_outputs(
        self,
        local_logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        group: Group | None,
        num_classes: int | None,
        options: LossOptions,
        settle: SettleShard,
    ) -> TokenOutputs:
        """:meth:`LossKernels.token_outputs` on logits ``[..., V_local]`` of the classes that ``settle`` finds."""
        platform = get_platform()
        shard = settle(local_logits, target, weight, group, num_classes, options)
        dim = max(len(platform.shape(local_logits)) - 1, 0)
        checked = replace(options, validate=False)
        return platform.loss_kernels.token_outputs(local_logits, dim, target, shard, weight, checked)

    def compiling(self) -> bool:
        """Whether a compiler is tracing the call: what is to be checked is checked when its graph runs."""
        return False

    @abstractmethod
    def linear_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: LinearLoss
    ) -> Tensor:
        """The loss of ``hidden @ weight.T + bias``, chunk by chunk: ``[..., H]``, ``[V_local, H]``, ``[V_local]``.

        Gradients of the weight and the bias are added up in fp32, that of ``hidden`` is summed over the ranks in fp32.
        """

    @abstractmethod
    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` largest of the last dim, descending, and their places (int64); the first one among equals first.

        NaN is larger than anything. Not differentiable.
        """

    @abstractmethod
    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """``x`` at places along the last dim; differentiable in ``x``."""


@lru_cache(maxsize=1)
def get_loss_functions() -> LossFunctions:
    """Those of this process's platform."""
    module = importlib.import_module(f"hyper_parallel.platform.{get_platform().name}.functional")
    functions: LossFunctions = module.create_loss_functions()
    return functions
