"""Gradients, the optimizer and the process of a PyTorch training job."""

from __future__ import annotations

import base64
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.platform.torch.model_settings import wrap_blocks, wrap_data_parallel
from hyper_parallel.platform.training import Learner, Loss, ModelSettings, TrainingTools

__all__ = ["TorchLearner", "TorchTrainingTools", "create_training_tools"]


class TorchLearner(Learner):
    """``loss.backward()`` and ``torch.optim.AdamW``.

    Attributes:
        optimized: what the optimizer changes, one for each of ``parameters``: these themselves, or, when the model
            computes in fewer bits, float32 tensors that they are rounded from.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any], settings: ModelSettings) -> None:
        wrap_blocks(model, settings)
        keeps_wide = settings.compute_dtype == "bfloat16" and settings.data_parallel != "fsdp"  # FSDP does it itself
        wide = [p.detach().clone() for p in _trained(model)] if keeps_wide else []
        if keeps_wide:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        self.model = wrap_data_parallel(model, settings)
        self.parameters = _trained(self.model)
        self.optimized = wide or self.parameters
        self._ddp = self.model if isinstance(self.model, nn.parallel.DistributedDataParallel) else None
        sharded = settings.data_mesh is not None and settings.data_parallel == "fsdp"
        self.sums_over_data = self._ddp is not None or sharded
        settings_of_adam = dict(options)
        decay = settings_of_adam.pop("weight_decay")
        matrices = [p for p in self.optimized if p.dim() > 1]
        vectors = [p for p in self.optimized if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **settings_of_adam)

    def announce_part(self, last: bool) -> None:
        if self._ddp is not None:
            # gradients that move to wider ones after each part must be summed in each
            self._ddp.require_backward_grad_sync = last or self.optimized is not self.parameters

    def accumulate(self, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = loss(tokens, labels)
        value.backward()
        if self.optimized is not self.parameters:
            self._widen_gradients()
        return value.detach()

    def _widen_gradients(self) -> None:
        for parameter, wide in zip(self.parameters, self.optimized, strict=True):
            if parameter.grad is None:
                continue
            if wide.grad is None:
                wide.grad = parameter.grad.float()
            else:
                wide.grad += parameter.grad
            parameter.grad = None

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.optimized]

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
        if self.optimized is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.optimized)

    def moments(self) -> Mapping[str, list[Tensor]]:
        states = [self._state(p) for p in self.optimized]
        found = {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}
        return found if self.optimized is self.parameters else {**found, "float32": self.optimized}

    @property
    def updates(self) -> int:
        return max((int(s["step"]) for s in self.optimizer.state.values()), default=0)

    @updates.setter
    def updates(self, count: int) -> None:
        for tensor in self.optimized:
            self._state(tensor)["step"].fill_(count)

    def _state(self, tensor: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a tensor; made here as AdamW makes it when it first sees a gradient."""
        state: dict[str, Tensor] = self.optimizer.state[tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        return state


def _trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


class TorchTrainingTools(TrainingTools):
    """Models start on the meta device."""

    def build(self, constructor: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            return constructor()

    def learner(
        self, model: nn.Module, options: Mapping[str, Any], settings: ModelSettings | None = None
    ) -> TorchLearner:
        return TorchLearner(model, options, settings or ModelSettings())

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        before = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in before.items():
                module.training = training

    def recomputed(self, function: Callable[..., Tensor], module: nn.Module, *tensors: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return function(*tensors)
        result: Tensor = checkpoint(function, *tensors, use_reentrant=False)
        return result

    def cross_entropy_sum(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        if type(logits) is Tensor and logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()  # sharded ones are summed in float32 without a copy
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
