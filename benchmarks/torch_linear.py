"""The last layer and the loss in one: ``linear_cross_entropy`` beside a layer that makes all logits."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import hyper_parallel
from benchmarks.memory import peak_extra_bytes
from benchmarks.timing import Clock, interleave
from hyper_parallel import init_device_mesh

__all__ = ["run"]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Forward and backward from hidden states to their gradient and the weight's."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tokens, hidden_size, classes = (256, 256, 8192) if options["quick"] else (2048, 1024, 16384)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    hidden = torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(classes // size, hidden_size, generator=torch.Generator().manual_seed(rank)).mul_(0.02)
    weight.requires_grad_()
    target = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(1))

    def separate(inplace: bool) -> torch.Tensor:
        loss = hyper_parallel.vocab_parallel_cross_entropy
        return loss(F.linear(hidden, weight), target, mesh["tp"], num_classes=classes, inplace=inplace)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "linear, vocab_parallel_cross_entropy": partial(separate, False),
        "linear, vocab_parallel_cross_entropy in place": partial(separate, True),
    }
    if hasattr(hyper_parallel, "linear_cross_entropy"):
        ways["linear_cross_entropy"] = lambda: hyper_parallel.linear_cross_entropy(
            hidden, weight, target, mesh["tp"], num_classes=classes
        )

    def step(way: Callable[[], torch.Tensor]) -> dict[str, float]:
        hidden.grad = weight.grad = None
        clock = Clock()
        loss = way()
        loss.backward()
        return {"seconds": clock.lap(), "loss": float(loss.detach())}

    losses = {name: step(way)["loss"] for name, way in ways.items()}
    peaks = {name: peak_extra_bytes(partial(step, way)) for name, way in ways.items()}
    times = interleave({name: partial(step, way) for name, way in ways.items()}, 2, dist.barrier)
    logits = tokens * classes // size * 4
    return [
        {
            "way": name,
            "both ms": round(1e3 * times[name]["seconds"], 1),
            "peak extra MiB": round((peaks[name] or 0) / 2**20, 1),
            "peak / local logits": round((peaks[name] or 0) / logits, 2),
            "loss": round(losses[name], 5),
        }
        for name in ways
    ]
