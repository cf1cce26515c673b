"""Gradients, the optimizer and the process of a PyTorch training job."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.platform.training import Learner, Loss, TrainingTools

__all__ = ["TorchLearner", "TorchTrainingTools", "create_training_tools"]


class TorchLearner(Learner):
    """``loss.backward()`` and ``torch.optim.AdamW``."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        settings = dict(options)
        decay = settings.pop("weight_decay")
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **settings)

    def accumulate(self, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = loss(tokens, labels)
        value.backward()
        return value.detach()

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    def map_gradients(self, reduce: Callable[[Tensor], Tensor]) -> None:
        gradients = [g for g in self.gradients() if g is not None]
        reduced = reduce(torch.cat([g.reshape(-1) for g in gradients]))
        for gradient, values in zip(gradients, reduced.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    def update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class TorchTrainingTools(TrainingTools):
    """Models start on the meta device."""

    def build(self, constructor: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            return constructor()

    def learner(self, model: nn.Module, options: Mapping[str, Any]) -> TorchLearner:
        return TorchLearner(model, options)

    def cross_entropy_sum(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="sum")

    def to_device(self, array: np.ndarray, device_type: str) -> Tensor:
        return torch.from_numpy(array).to(_device(device_type), non_blocking=True)

    def seed(self, seed: int, device_type: str) -> None:
        if device_type == "cuda":
            torch.cuda.set_device(_device(device_type))
        torch.manual_seed(seed)

    def peak_memory(self, device_type: str) -> int:
        if device_type == "cuda":
            return torch.cuda.max_memory_allocated()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def create_training_tools() -> TrainingTools:
    """The tools of this backend."""
    return TorchTrainingTools()


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
