"""The last layer and the loss in one: ``linear_cross_entropy`` beside a layer that makes all logits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import hyper_parallel
from benchmarks.memory import peak_extra_bytes
from benchmarks.timing import Clock, interleave
from hyper_parallel import init_device_mesh

__all__ = ["run"]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Forward and backward from hidden states to their gradient and the weight's."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tokens, hidden_size, classes = (256, 256, 8192) if options["quick"] else (2048, 1024, 131072)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    native = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    hidden = torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(size)).requires_grad_()
    weight = torch.randn(classes // size, hidden_size, generator=torch.Generator().manual_seed(rank)).mul_(0.02)
    weight.requires_grad_()
    target = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(1))

    def separate(inplace: bool) -> torch.Tensor:
        loss = hyper_parallel.vocab_parallel_cross_entropy
        logits = F.linear(copy_to_ranks(hidden), weight)
        return loss(logits, target, mesh["tp"], num_classes=classes, inplace=inplace)

    def pytorch() -> torch.Tensor:
        logits = F.linear(copy_to_ranks(hidden), weight)
        sharded = DTensor.from_local(logits, native, [Shard(1)], run_check=False)
        return F.cross_entropy(sharded, target).to_local()

    def fused() -> torch.Tensor:
        return hyper_parallel.linear_cross_entropy(hidden, weight, target, mesh["tp"], num_classes=classes)

    ways: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], AbstractContextManager[object]]]] = {
        _SEPARATE: (partial(separate, False), nullcontext),
        f"{_SEPARATE}, in place": (partial(separate, True), nullcontext),
        "linear_cross_entropy": (fused, nullcontext),
        "linear, PyTorch loss_parallel": (pytorch, loss_parallel),
    }

    def step(name: str) -> dict[str, float]:
        hidden.grad = weight.grad = None
        way, around = ways[name]
        worked, clock = time.process_time(), Clock()
        with around():
            loss = way()
            loss.backward()
        return {"both": clock.lap(), "cpu": time.process_time() - worked, "loss": float(loss.detach())}

    peaks = {}
    for name in ways:
        hidden.grad = weight.grad = None  # what is freed meanwhile would count
        peaks[name] = peak_extra_bytes(partial(step, name))
    times = interleave({name: partial(step, name) for name in ways}, 2 if options["quick"] else 3, dist.barrier)
    logits, returned = tokens * classes // size * 4, 4 * (hidden.numel() + weight.numel())
    base = times[_SEPARATE]
    return [
        {
            "way": name,
            "both ms": round(1e3 * times[name]["both"], 1),
            "CPU ms": round(1e3 * times[name]["cpu"], 1),
            "CPU, of separate": round(times[name]["cpu"] / base["cpu"], 2),
            "peak beyond both gradients, of the logits": round(((peaks[name] or 0) - returned) / logits, 2),
            "loss": round(times[name]["loss"], 5),
        }
        for name in ways
    ]


_SEPARATE = "linear, vocab_parallel_cross_entropy"


class _CopyToRanks(torch.autograd.Function):
    """The same hidden states on all ranks, whose gradients are summed: what a column-parallel layer begins with."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad)
        return grad


def copy_to_ranks(hidden: torch.Tensor) -> torch.Tensor:
    """Identity, with the ranks' gradients summed."""
    result: torch.Tensor = _CopyToRanks.apply(hidden)
    return result
