"""The facts of a loss call, read from PyTorch tensors, and the exchange of the ranks' headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.loss_facts import FactReader
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch.collectives import all_gather

__all__ = ["TorchFactReader", "exchange_headers"]


class TorchFactReader(FactReader):
    """On any device."""

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def dtype_name(self, x: torch.Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def requires_grad(self, x: torch.Tensor) -> bool:
        return x.requires_grad and torch.is_grad_enabled()

    def is_leaf(self, x: torch.Tensor) -> bool:
        return x.is_leaf and x.requires_grad

    def labels(self, target: torch.Tensor) -> torch.Tensor:
        return target.detach().reshape(-1).long()

    def weight_bits(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().double().view(torch.int64)

    def positions(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(like.numel(), device=like.device)


def exchange_headers(header: Sequence[int], group: Group, like: torch.Tensor) -> list[list[int]]:
    """All-gather int64 values on the device of ``like``."""
    gathered = all_gather(torch.tensor(header, dtype=torch.int64, device=like.device), group)
    return gathered.tolist()  # type: ignore[no-any-return]
