"""Building, filling and updating a PyTorch model."""

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

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform.training import SHARD_SPEC, Learner, Loss, TrainingTools

__all__ = ["TorchLearner", "TorchTrainingTools", "create_training_tools"]


class TorchLearner(Learner):
    """``loss.backward()`` and ``torch.optim.AdamW``."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        settings = dict(options)
        decay = settings.pop("weight_decay")
        matrices = [p for p in self._parameters if p.dim() > 1]
        vectors = [p for p in self._parameters if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **settings)

    def accumulate(self, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = loss(tokens, labels)
        value.backward()
        return value.detach()

    def _gradients(self, cut: bool | None = None) -> list[Tensor]:
        return [
            p.grad
            for p in self._parameters
            if p.grad is not None and (cut is None or hasattr(p, SHARD_SPEC) == cut)
        ]

    def map_gradients(self, reduce: Callable[[Tensor], Tensor]) -> None:
        gradients = self._gradients()
        reduced = reduce(torch.cat([g.reshape(-1) for g in gradients]))
        for gradient, values in zip(gradients, reduced.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    def gradient_squares(self) -> tuple[Tensor, Tensor]:
        return self._squares(True), self._squares(False)

    def _squares(self, cut: bool) -> Tensor:
        gradients = self._gradients(cut)
        if not gradients:
            return torch.zeros((), device=self._parameters[0].device)
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        return torch.stack(norms).square().sum()

    def update(self, lr: float, squares: Tensor, max_norm: float | None) -> Tensor:
        norm = squares.sqrt()
        if max_norm is not None:
            torch._foreach_mul_(self._gradients(), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


class TorchTrainingTools(TrainingTools):
    """On the meta device first, then on this process's own."""

    def build(self, constructor: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            return constructor()

    def parameter_shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    def cut_parameter(self, model: nn.Module, name: str, spec: ShardSpec, rank: int) -> None:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        old = getattr(module, leaf)
        if tuple(old.shape) != spec.shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(old.shape)}, but its cut describes {spec.shape}"
            )
        new = nn.Parameter(
            torch.empty(spec.local_shape(rank), dtype=old.dtype, device=old.device),
            requires_grad=old.requires_grad,
        )
        setattr(new, SHARD_SPEC, spec)
        setattr(module, leaf, new)

    def wrap_layer(
        self,
        model: nn.Module,
        name: str,
        before: Callable[[Tensor], Tensor],
        after: Callable[[Tensor], Tensor],
    ) -> None:
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, args: (before(args[0]), *args[1:]))
        layer.register_forward_hook(lambda _, args, out: after(out))

    def materialize(
        self, model: nn.Module, values: Callable[[str, ShardSpec], Any], device_type: str
    ) -> None:
        device = _device(device_type)
        with torch.no_grad():
            for name, old in list(model.named_parameters()):
                spec = getattr(old, SHARD_SPEC, None)
                array = values(name, spec or ShardSpec.replicated(tuple(old.shape), 1))
                new = nn.Parameter(
                    torch.from_numpy(array).to(device, old.dtype), requires_grad=old.requires_grad
                )
                if spec is not None:
                    setattr(new, SHARD_SPEC, spec)
                _replace_everywhere(model, old, new)

    def learner(self, model: nn.Module, options: Mapping[str, Any]) -> TorchLearner:
        return TorchLearner(model, options)

    def cross_entropy_sum(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="sum"
        )

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


def _replace_everywhere(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Tied weights stay tied: every module that holds ``old`` gets ``new``."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is old:
                module._parameters[name] = new
