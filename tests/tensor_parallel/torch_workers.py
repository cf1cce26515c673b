"""What runs in PyTorch workers: the mesh, tensors, and a count of the collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from hyper_parallel import DeviceMesh, init_device_mesh
from hyper_parallel.platform.torch import collectives


@cache
def tp_mesh() -> DeviceMesh:
    """All ranks of the group, as a 1-D mesh."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def tensor(array: np.ndarray, dtype: str = "float64", grad: bool = False) -> torch.Tensor:
    """A leaf tensor."""
    return torch.from_numpy(np.ascontiguousarray(array).copy()).to(getattr(torch, dtype)).requires_grad_(grad)


def array(x: Any) -> np.ndarray:
    """Values on the host, as float64."""
    return x.detach().to(torch.float64).numpy()


@contextmanager
def count_collectives() -> Iterator[dict[str, int]]:
    """Counts the collectives that start inside."""
    counts: dict[str, int] = {}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(dist, "all_reduce", counted("all_reduce", dist.all_reduce)),
        mock.patch.object(dist, "broadcast", counted("broadcast", dist.broadcast)),
        mock.patch.object(dist, "all_to_all_single", counted("all_to_all", dist.all_to_all_single)),
        mock.patch.object(
            collectives, "_all_gather_single", counted("all_gather", collectives._all_gather_single)
        ),
        mock.patch.object(
            collectives, "_reduce_scatter_single", counted("reduce_scatter", collectives._reduce_scatter_single)
        ),
    ):
        yield counts
