"""What a DTensor operator costs on MindSpore before anything is computed: tiny tensors, warm caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from benchmarks.mindspore_loss import barrier
from benchmarks.timing import Clock, interleave
from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh

__all__ = ["run"]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Microseconds a call, of ours and of the plain tensors; MindSpore has no DTensor in its package."""
    size, calls = int(os.environ["WORLD_SIZE"]), 100 if options["quick"] else 500
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    x, w = (Tensor(np.random.default_rng(0).standard_normal(s).astype(np.float32)) for s in ((4, 8), (8, 4)))
    kinds = {
        "ours": (DTensor.from_local(x, mesh, [Shard(0)]), DTensor.from_local(w, mesh, [Replicate()])),
        "plain tensor": (x, w),
    }
    operators: dict[str, Callable[[Any, Any], object]] = {
        "add": lambda a, b: a + a,
        "relu": lambda a, b: ops.relu(a),
        "matmul": lambda a, b: ops.matmul(a, b),
    }
    rows = []
    for name, operator in operators.items():
        ways = {kind: partial(_seconds, operator, a, b, calls) for kind, (a, b) in kinds.items()}
        for way in ways.values():  # fill the caches
            way()
        times = interleave(ways, 5, barrier(mesh.get_group()))
        row = {kind: round(1e6 * t["seconds"], 1) for kind, t in times.items()}
        rows.append({"operator": name, **row, "on top": round(row["ours"] - row["plain tensor"], 1)})
    return rows


def _seconds(operator: Callable[[Any, Any], object], a: Any, b: Any, calls: int) -> dict[str, float]:
    clock = Clock()
    for _ in range(calls):
        operator(a, b)
    mindspore.runtime.synchronize()
    return {"seconds": clock.lap() / calls}
