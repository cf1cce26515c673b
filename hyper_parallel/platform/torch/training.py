"""Gradients, the optimizer and the process of a PyTorch training job."""

from __future__ import annotations

import base64
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

    def moments(self) -> Mapping[str, list[Tensor]]:
        states = [self._state(p) for p in self.parameters]
        return {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}

    @property
    def updates(self) -> int:
        return max((int(s["step"]) for s in self.optimizer.state.values()), default=0)

    @updates.setter
    def updates(self, count: int) -> None:
        for parameter in self.parameters:
            self._state(parameter)["step"].fill_(count)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a parameter; made here as AdamW makes it when it first sees a gradient."""
        state: dict[str, Tensor] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


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

    def rng_state(self, device_type: str) -> dict[str, str]:
        return {name: base64.b64encode(bytes(get().tolist())).decode() for name, (get, _) in _rngs(device_type).items()}

    def set_rng_state(self, state: Mapping[str, str], device_type: str) -> None:
        generators = _rngs(device_type)
        if state.keys() != generators.keys():
            raise ValueError(f"random states of {sorted(state)}; expected those of {sorted(generators)}")
        for name, (_, put) in generators.items():
            put(torch.frombuffer(bytearray(base64.b64decode(state[name], validate=True)), dtype=torch.uint8))

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


def _rngs(device_type: str) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """How to get and set the state of each generator."""
    found: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state)
    }
    if device_type == "cuda":
        found["torch.cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return found


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
