"""The class-sharded losses of PyTorch side by side, in one process group: time, memory, traffic, the same values."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.limit import copy_bandwidth
from benchmarks.memory import peak_extra_bytes
from benchmarks.timing import Clock, interleave
from benchmarks.torch_losses import Loss, Setting, available_losses
from benchmarks.traffic import TrafficMeter

__all__ = ["measure_once", "run"]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """``options``: cases as dicts of ``dtype``, ``tokens``, ``classes``, ``only`` (names, or None), ``repetitions``."""
    return [_run_case(case) for case in options["cases"]]


class Produced(torch.autograd.Function):
    """Logits as a last layer would leave them: computed, in memory of their own."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, logits: torch.Tensor, taken: list[torch.Tensor]) -> torch.Tensor:
        ctx.taken = taken
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.taken.append(grad)
        return None, None, None


def _run_case(case: dict[str, Any]) -> dict[str, Any]:
    tokens, classes, dtype = case["tokens"], case["classes"], getattr(torch, case["dtype"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    setting = Setting.make(tokens, classes)
    width = classes // size
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(tokens, width, generator=generator).to(dtype)
    losses, missing = available_losses(setting, case["only"])
    facts = {name: _facts(loss, logits) for name, loss in losses.items()}
    _agree({name: fact["loss"] for name, fact in facts.items()})
    calls: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(measure_once, loss, logits) for name, loss in losses.items()
    }
    times = interleave(calls, case["repetitions"], dist.barrier)
    return {
        **case,
        "size": size,
        "logits_bytes": logits.numel() * logits.element_size(),
        "bandwidth": copy_bandwidth(logits, dist.barrier),
        "missing": missing,
        "losses": {name: {**facts[name], **times[name]} for name in losses},
    }


def measure_once(loss: Loss, logits: torch.Tensor) -> dict[str, float]:
    """Seconds of forward, backward and both, on logits made for the purpose."""
    return _Step(loss, logits).run()


class _Step:
    """One forward and backward pass of a loss, on logits that are there before it starts."""

    def __init__(self, loss: Loss, logits: torch.Tensor) -> None:
        self._loss = loss
        self._gradients: list[torch.Tensor] = []
        self._produced = [Produced.apply(torch.zeros((), requires_grad=True), logits, self._gradients)]

    def run(self) -> dict[str, float]:
        """As TorchTitan's Trainer does, let go of the logits between the passes, unless the loss is on kept ones."""
        dist.barrier()
        held = list(self._produced) if self._loss.keeps else []
        with self._loss.around():
            worked = time.process_time()
            clock = Clock()
            value = self._loss.compute(self._produced.pop())
            forward = clock.lap()
            value.backward()
            backward = clock.lap()
            worked = time.process_time() - worked
        held.clear()
        self.value = float(value.detach())
        return {"forward": forward, "backward": backward, "both": forward + backward, "cpu": worked}

    @property
    def gradient(self) -> torch.Tensor:
        (gradient,) = self._gradients
        return gradient.detach()


def _facts(loss: Loss, logits: torch.Tensor) -> dict[str, Any]:
    """What needs no repetition, of a second call: the first loads modules and connects the ranks."""
    _Step(loss, logits).run()
    meter = TrafficMeter()
    step = _Step(loss, logits)
    with meter:
        peak = peak_extra_bytes(step.run)
    return {
        "loss": step.value,
        "gradient": float(step.gradient.abs().sum(dtype=torch.float64)),
        "peak_bytes": peak,
        "collectives": dict(meter.calls),
        "bytes_sent": meter.bytes_sent,
    }


def _agree(values: dict[str, float]) -> None:
    expected = next(iter(values.values()))
    for name, value in values.items():
        if not math.isclose(value, expected, rel_tol=1e-2):  # one of them rounds the loss to bf16
            raise RuntimeError(f"{name} computes a loss of {value}, others {expected}")
