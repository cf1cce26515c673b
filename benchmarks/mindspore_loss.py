"""The class-sharded losses of MindSpore side by side, in one process group."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from benchmarks.memory import peak_extra_bytes
from benchmarks.mindspore_traffic import Traffic, count_traffic
from benchmarks.timing import Clock, interleave
from hyper_parallel import DTensor, Shard, get_platform, init_device_mesh, loss_parallel
from hyper_parallel.platform.platform import Group

__all__ = ["barrier", "run"]

Loss = Callable[[Tensor], Tensor]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """As ``benchmarks.torch_loss``."""
    return [_run_case(case) for case in options["cases"]]


def _run_case(case: dict[str, Any]) -> dict[str, Any]:
    tokens, classes = case["tokens"], min(case["classes"], 32768)  # gathered logits take too long beyond
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    target = Tensor(np.random.default_rng(1).integers(classes, size=tokens).astype(np.int32))
    local = np.random.default_rng(rank).standard_normal((tokens, classes // size)).astype(np.float32)
    logits = Tensor(local)
    losses: dict[str, Loss] = {
        "ours: context, DTensor": partial(_context, mesh, classes, target),
        "MindFormers' formula": partial(_mindformers, group, target),
        "gather + ops.cross_entropy": partial(_gather, group, target),
    }
    functional = getattr(__import__("hyper_parallel"), "vocab_parallel_cross_entropy", None)
    if functional is not None:
        losses["ours: functional"] = lambda x: functional(x, target, group, num_classes=classes)
    values = {name: float(loss(logits).asnumpy()) for name, loss in losses.items()}
    expected = next(iter(values.values()))
    for name, value in values.items():
        if not math.isclose(value, expected, rel_tol=1e-3):
            raise RuntimeError(f"{name} computes a loss of {value}, others {expected}")
    peaks = {name: peak_extra_bytes(partial(_both, loss, logits)) for name, loss in losses.items()}
    times = interleave(
        {name: partial(_times, loss, logits) for name, loss in losses.items()}, case["repetitions"], barrier(group)
    )
    # last: what MindSpore's pool of memory has kept from a backward pass would hide the peak of the next
    traffic = {name: _traffic(loss, logits) for name, loss in losses.items()}
    return {
        **case,
        "classes": classes,
        "size": size,
        "logits_bytes": local.nbytes,
        "bandwidth": _bandwidth(local),
        "missing": {},
        "losses": {
            name: {
                **times[name],
                "loss": values[name],
                "peak_bytes": peaks[name],
                "collectives": dict(traffic[name].calls),
                "bytes_sent": traffic[name].bytes_sent,
            }
            for name in losses
        },
    }


def _both(loss: Loss, logits: Tensor) -> None:
    mindspore.value_and_grad(lambda x: loss(x))(logits)[1].asnumpy()  # it asks for a function's name


def _traffic(loss: Loss, logits: Tensor) -> Traffic:
    with count_traffic() as seen:
        _both(loss, logits)
    return seen


def _times(loss: Loss, logits: Tensor) -> dict[str, float]:
    """Forward alone, then both: MindSpore's gradients come with the value, so backward is the difference."""
    clock = Clock()
    loss(logits).asnumpy()
    forward = clock.lap()
    worked = time.process_time()
    _both(loss, logits)
    both = clock.lap()
    worked = time.process_time() - worked
    return {"forward": forward, "backward": max(0.0, both - forward), "both": both, "cpu": worked}


def barrier(group: Group) -> Callable[[], None]:
    """What makes ranks wait for each other."""
    from hyper_parallel.platform.mindspore.collectives import all_reduce

    return lambda: all_reduce(Tensor(np.zeros(1, np.float32)), "sum", group).asnumpy()


def _bandwidth(local: np.ndarray[Any, Any]) -> float:
    out = np.zeros_like(local)
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        np.copyto(out, local)
        seconds.append(time.thread_time() - start)
    return 2 * local.nbytes / sorted(seconds)[2]


def _context(mesh: Any, classes: int, target: Tensor, x: Tensor) -> Tensor:
    logits = DTensor.from_local(x, mesh, [Shard(1)], shape=(x.shape[0], classes))
    with loss_parallel():
        return ops.cross_entropy(logits, target).to_local()


def _reduced(x: Tensor, op: str, group: Group) -> Tensor:
    """All-reduce, whose adjoint hands the gradient on: the gradient of what all ranks hold alike is the same."""
    from hyper_parallel.platform.mindspore.collectives import all_reduce

    return get_platform().linear_map(x, lambda y: all_reduce(y, op, group), lambda g: g)


def _mindformers(group: Group, target: Tensor, x: Tensor) -> Tensor:
    """log-softmax in pieces, as MindFormers' vocabulary-parallel cross-entropy is written: three all-reduces."""
    classes = x.shape[1]
    highest = _reduced(ops.stop_gradient(x.max(axis=1)), "max", group)
    shifted = x - highest.expand_dims(1)
    exponentials = ops.exp(shifted)
    total = _reduced(exponentials.sum(axis=1), "sum", group)
    log_softmax = shifted - ops.log(total).expand_dims(1)
    place = target - group.rank * classes
    here = ops.logical_and(place >= 0, place < classes)
    one_hot = ops.one_hot(ops.where(here, place, -1), classes)
    log_prob = _reduced((log_softmax * one_hot).sum(axis=1), "sum", group)
    return -log_prob.mean()


def _gather(group: Group, target: Tensor, x: Tensor) -> Tensor:
    from hyper_parallel.platform.mindspore.collectives import all_gather_uneven

    width = x.shape[1]
    whole = get_platform().linear_map(
        x,
        lambda y: all_gather_uneven(y, 1, [width] * group.size, group),
        lambda g: g[:, group.rank * width : (group.rank + 1) * width].copy(),
    )
    return ops.cross_entropy(whole, target)
