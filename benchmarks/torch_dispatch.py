"""What a DTensor operator costs before anything is computed: tiny tensors, warm caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.timing import Clock, interleave
from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh

__all__ = ["run"]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Microseconds a call, of ours, of PyTorch's DTensor, and of the plain tensors."""
    from torch.distributed.tensor import DTensor as Native
    from torch.distributed.tensor import Replicate as NativeReplicate
    from torch.distributed.tensor import Shard as NativeShard

    size, calls = dist.get_world_size(), 200 if options["quick"] else 1000
    ours, theirs = (
        make("cpu", (size,), mesh_dim_names=("tp",)) for make in (init_device_mesh, dist.device_mesh.init_device_mesh)
    )
    x, w = torch.randn(4, 8), torch.randn(8, 4)
    kinds = {
        "ours": (DTensor.from_local(x, ours, [Shard(0)]), DTensor.from_local(w, ours, [Replicate()])),
        "PyTorch DTensor": (
            Native.from_local(x, theirs, [NativeShard(0)], run_check=False),
            Native.from_local(w, theirs, [NativeReplicate()], run_check=False),
        ),
        "plain tensor": (x, w),
    }
    operators: dict[str, Callable[[Any, Any], object]] = {
        "add": lambda a, b: a + a,
        "relu": lambda a, b: torch.relu(a),
        "matmul": lambda a, b: a @ b,
    }
    rows = []
    for name, operator in operators.items():
        for a, b in kinds.values():  # fill the caches
            operator(a, b)
        ways = {kind: partial(_seconds, operator, a, b, calls) for kind, (a, b) in kinds.items()}
        times = interleave(ways, 5, dist.barrier)
        row = {kind: round(1e6 * t["seconds"], 1) for kind, t in times.items()}
        rows.append({"operator": name, **row, "ours / PyTorch DTensor": round(row["ours"] / row["PyTorch DTensor"], 2)})
    return rows


def _seconds(operator: Callable[[Any, Any], object], a: Any, b: Any, calls: int) -> dict[str, float]:
    clock = Clock()
    for _ in range(calls):
        operator(a, b)
    return {"seconds": clock.lap() / calls}
