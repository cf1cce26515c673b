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
    """Logits as a last layer would leave them: computed, so that in-place losses may overwrite them."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, logits: torch.Tensor, taken: list[torch.Tensor]) -> torch.Tensor:
        ctx.taken = taken
        # the same memory, but no view: nothing that writes into it may notice a base
        return logits.new_empty(0).set_(logits.untyped_storage(), 0, logits.shape, logits.stride())

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
    room = torch.empty_like(logits)  # what a loss may overwrite, filled anew before each measurement
    facts = {name: _facts(loss, logits, room) for name, loss in losses.items()}
    _agree({name: fact["loss"] for name, fact in facts.items()})
    calls: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(measure_once, loss, logits, room) for name, loss in losses.items()
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


def _step(loss: Loss, logits: torch.Tensor, room: torch.Tensor) -> tuple[float, list[torch.Tensor], dict[str, float]]:
    source = torch.zeros((), requires_grad=True)
    taken: list[torch.Tensor] = []
    with loss.around():
        produced = Produced.apply(source, room, taken)
        worked = time.process_time()
        clock = Clock()
        value = loss.compute(produced)
        forward = clock.lap()
        value.backward()
        backward = clock.lap()
        worked = time.process_time() - worked
    times = {"forward": forward, "backward": backward, "both": forward + backward, "cpu": worked}
    return float(value.detach()), taken, times


def measure_once(loss: Loss, logits: torch.Tensor, room: torch.Tensor) -> dict[str, float]:
    """Seconds of forward, backward and both; ``room`` is where the logits are while the loss works on them."""
    room.copy_(logits)
    dist.barrier()
    return _step(loss, logits, room)[2]


def _facts(loss: Loss, logits: torch.Tensor, room: torch.Tensor) -> dict[str, Any]:
    """What needs no repetition; this also warms up."""
    found: dict[str, Any] = {}
    meter = TrafficMeter()

    def step() -> None:
        with meter:
            found["loss"], found["gradient"], _ = _step(loss, logits, room)

    room.copy_(logits)
    dist.barrier()
    peak = peak_extra_bytes(step)
    (gradient,) = found["gradient"]
    return {
        "loss": found["loss"],
        "gradient": float(gradient.detach().abs().sum(dtype=torch.float64)),
        "peak_bytes": peak,
        "collectives": dict(meter.calls),
        "bytes_sent": meter.bytes_sent,
    }


def _agree(values: dict[str, float]) -> None:
    expected = next(iter(values.values()))
    for name, value in values.items():
        if not math.isclose(value, expected, rel_tol=1e-2):  # one of them rounds the loss to bf16
            raise RuntimeError(f"{name} computes a loss of {value}, others {expected}")
