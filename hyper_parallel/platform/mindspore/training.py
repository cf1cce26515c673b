"""Gradients, the optimizer and the process of a MindSpore training job."""

from __future__ import annotations

import base64
import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, _no_grad, nn, ops
from mindspore.common.api import _pynative_executor

from hyper_parallel.platform.mindspore import _communicator, _host, random
from hyper_parallel.platform.mindspore.deferred import deferred_parameters
from hyper_parallel.platform.mindspore.recompute import recompute_blocks, recomputed
from hyper_parallel.platform.training import Learner, Loss, ModelSettings, TrainingTools, absent_settings

__all__ = ["MindSporeLearner", "MindSporeTrainingTools", "create_training_tools"]


class MindSporeLearner(Learner):
    """``mindspore.value_and_grad`` and AdamW.

    The framework's own optimizers do not fit: those of ``mint.optim`` change nothing on CPU, ``nn.AdamWeightDecay``
    corrects no bias, and ``experimental.optim.AdamW`` compiles its step, anew where gradients do not come straight from
    the graph. So AdamW is made here of the fused operator of the second, with the correction in its numbers: with
    ``c1 = 1 - beta1^t`` and ``c2 = sqrt(1 - beta2^t)``,

        lr (m / c1) / (sqrt(v) / c2 + eps) + lr decay w  =  (lr c2 / c1) (m / (sqrt(v) + c2 eps) + (decay c1 / c2) w)
    """

    updates: int = 0

    def __init__(self, model: nn.Cell, options: Mapping[str, Any]) -> None:
        self.model = model
        self.parameters = list(model.trainable_params())
        self._betas, self._eps, self._decay = options["betas"], options["eps"], options["weight_decay"]
        self._moments = {name: [_zeros_like(p, name) for p in self.parameters] for name in ("exp_avg", "exp_avg_sq")}
        self._gradients: list[Tensor] = []
        self._loss: Loss = _no_loss
        self._value_and_grad = mindspore.value_and_grad(
            lambda tokens, labels: self._loss(tokens, labels), None, self.parameters
        )
        self._step = ops.AdamWeightDecay()

    def accumulate(self, loss: Loss, tokens: Tensor, labels: Tensor) -> Tensor:
        self._loss = loss
        try:
            value, gradients = self._value_and_grad(tokens, labels)
        except BaseException:
            # else it goes on recording, and what runs next fails for no reason of its own
            _pynative_executor.clear_res()
            _pynative_executor.set_grad_flag(False)
            raise
        finally:
            self._loss = _no_loss
        if self._gradients:
            with _no_grad():
                gradients = [before + new for before, new in zip(self._gradients, gradients, strict=True)]
        self._gradients = list(gradients)
        return ops.stop_gradient(value)

    def gradients(self) -> list[Tensor | None]:
        return list(self._gradients) or [None] * len(self.parameters)

    def map_gradients(self, reduce: Callable[[Tensor], Tensor]) -> None:
        hosts = [_host.to_host(g) for g in self._gradients]
        flat = _host.to_host(reduce(_host.to_tensor(np.concatenate([h.reshape(-1) for h in hosts]))))
        ends = np.cumsum([h.size for h in hosts])
        pieces = np.split(flat, ends[:-1])
        self._gradients = [_host.to_tensor(p.reshape(h.shape).copy()) for p, h in zip(pieces, hosts, strict=True)]

    def update(self, lr: float) -> None:
        self.updates += 1
        beta1, beta2 = self._betas
        c1, c2 = 1 - beta1**self.updates, math.sqrt(1 - beta2**self.updates)
        rows = zip(self.parameters, *self._moments.values(), self._gradients, strict=True)
        for parameter, first, second, gradient in rows:
            decay = self._decay if len(parameter.shape) > 1 else 0.0
            if parameter.size:
                self._step(
                    parameter, first, second, lr * c2 / c1, beta1, beta2, self._eps * c2, decay * c1 / c2, gradient
                )
        self._gradients = []

    def moments(self) -> Mapping[str, list[Tensor]]:
        return self._moments


class MindSporeTrainingTools(TrainingTools):
    """PyNative mode; models start with parameters on the meta device."""

    def build(self, constructor: Callable[[], nn.Cell]) -> nn.Cell:
        with deferred_parameters():
            return constructor()

    def learner(
        self, model: nn.Cell, options: Mapping[str, Any], settings: ModelSettings | None = None
    ) -> MindSporeLearner:
        settings = settings or ModelSettings()
        _refuse_what_is_not_there(settings)
        if settings.activation_checkpoint == "full":
            recompute_blocks(model)
        return MindSporeLearner(model, options)

    def cross_entropy_sum(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        if type(logits) is Tensor and logits.dtype != mindspore.float64:
            logits = logits.astype(mindspore.float32)  # sharded ones are summed in float32 without a copy
        rows = logits.reshape(-1, logits.shape[-1])
        return ops.cross_entropy(rows, labels.reshape(-1), ignore_index=ignore_index, reduction="sum")

    @contextmanager
    def evaluating(self, model: nn.Cell) -> Iterator[None]:
        before = [(cell, cell.training) for _, cell in model.cells_and_names()]
        model.set_train(False)
        try:
            with _no_grad():
                yield
        finally:
            for cell, training in before:
                cell.training = training

    def recomputed(self, function: Callable[..., Tensor], module: nn.Cell, *tensors: Tensor) -> Tensor:
        result: Tensor = recomputed(function, tensors, module.trainable_params())
        return result

    def to_device(self, array: np.ndarray, device_type: str) -> Tensor:
        return Tensor(np.ascontiguousarray(array))

    def seed(self, seed: int, device_type: str) -> None:
        random.set_seed(seed)

    def rng_state(self, device_type: str) -> dict[str, str]:
        return {"mindspore": base64.b64encode(mindspore.get_rng_state().asnumpy().tobytes()).decode()}

    def set_rng_state(self, state: Mapping[str, str], device_type: str) -> None:
        if state.keys() != {"mindspore"}:
            raise ValueError(f"random states of {sorted(state)}; expected those of ['mindspore']")
        raw = base64.b64decode(state["mindspore"], validate=True)
        mindspore.set_rng_state(Tensor(np.frombuffer(raw, np.uint8).copy()))

    def peak_memory(self, device_type: str) -> int:
        if device_type != "cpu":
            return int(mindspore.runtime.max_memory_allocated())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def close(self) -> None:
        if _communicator.is_initialized():
            _communicator.leave()


def create_training_tools() -> TrainingTools:
    """The tools of this backend."""
    return MindSporeTrainingTools()


def _refuse_what_is_not_there(settings: ModelSettings) -> None:
    """Raises ValueError for what runs on PyTorch alone."""
    for name, expected in absent_settings("mindspore", vars(settings)).items():
        raise ValueError(
            f"{name}={getattr(settings, name)!r} is not there on MindSpore; expected {expected!r}, or the 'torch' "
            "backend"
        )


def _no_loss(tokens: Tensor, labels: Tensor) -> Tensor:
    raise RuntimeError("the gradient function was called outside accumulate()")


def _zeros_like(parameter: Parameter, name: str) -> Parameter:
    return Parameter(ops.zeros(tuple(parameter.shape), parameter.dtype), name=f"{name}.{parameter.name}")
