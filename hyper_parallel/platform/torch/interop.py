"""PyTorch's own mesh and DTensor: conversion without copies, and the hook that offers them to loss parallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.platform import Group, NativeDTensor, NativeMesh
from hyper_parallel.platform.torch.op_names import LOSS_OP_NAMES, get_op_name

__all__ = [
    "NativeDTensorMode",
    "describe_mesh",
    "is_native_dtensor",
    "native_mesh",
    "put_together",
    "take_apart",
]

Intercept = Callable[[str, Any, Sequence[Any], Mapping[str, Any]], Any]


def describe_mesh(mesh: Any) -> NativeMesh:
    """Ranks, names and groups of a ``torch.distributed`` DeviceMesh; creates no group."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a torch.distributed DeviceMesh, found {type(mesh).__name__}")
    groups = []
    for d in range(mesh.ndim):
        handle = mesh.get_group(d)
        groups.append(Group(tuple(dist.get_process_group_ranks(handle)), handle, dist.get_rank(handle)))
    return NativeMesh(mesh.device_type, mesh.mesh.numpy(), mesh.mesh_dim_names, tuple(groups))


def native_mesh(mesh: Any) -> Any:
    """The ``torch.distributed`` DeviceMesh with the same ranks and groups as ours; made once per mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    if mesh._native is None:
        handles = [mesh.get_group(d).handle or _lonely_group(mesh.get_group(d)) for d in range(mesh.ndim)]
        names = mesh.mesh_dim_names
        if mesh.ndim == 1:
            mesh._native = DeviceMesh.from_group(handles[0], mesh.device_type, mesh_dim_names=names)
        else:
            mesh._native = DeviceMesh.from_group(
                handles, mesh.device_type, mesh=torch.as_tensor(mesh.mesh), mesh_dim_names=names
            )
    return mesh._native


def _lonely_group(group: Group) -> Any:
    return dist.new_group(list(group.ranks), use_local_synchronization=True)


def is_native_dtensor(x: Any) -> bool:
    """Whether ``x`` is PyTorch's DTensor; does not import its module, which takes seconds."""
    kind = type(x)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def take_apart(tensor: Any) -> NativeDTensor:
    """Local tensor (same storage and graph), mesh, placements and global shape of PyTorch's DTensor."""
    if not is_native_dtensor(tensor):
        raise TypeError(f"expected a torch.distributed.tensor.DTensor, found {type(tensor).__name__}")
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements: list[tuple[str, Any]] = []
    for p in tensor.placements:
        if type(p) is Shard:
            placements.append(("shard", p.dim))
        elif type(p) is Replicate:
            placements.append(("replicate", None))
        elif type(p) is Partial and p.reduce_op in ("sum", "max", "min"):
            placements.append(("partial", p.reduce_op))
        else:
            raise ValueError(f"placement {p!r} has no counterpart; expected Shard, Replicate or Partial(sum, max, min)")
    return NativeDTensor(tensor.to_local(), tensor.device_mesh, tuple(placements), tuple(tensor.shape))


def put_together(parts: NativeDTensor) -> Any:
    """PyTorch's DTensor over the same storage and graph."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    make: dict[str, Any] = {"shard": Shard, "replicate": lambda _: Replicate(), "partial": Partial}
    stride, step = [], 1
    for s in reversed(parts.shape):
        stride.append(step)
        step *= max(s, 1)
    return DTensor.from_local(
        parts.local,
        parts.mesh,
        [make[kind](value) for kind, value in parts.placements],
        run_check=False,
        shape=torch.Size(parts.shape),
        stride=tuple(reversed(stride)),
    )


class NativeDTensorMode(TorchFunctionMode):
    """Sees every function call while it is entered; only loss operators on PyTorch's DTensors are touched."""

    def __init__(self, intercept: Intercept) -> None:
        super().__init__()
        self._intercept = intercept

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in LOSS_OP_NAMES and any(
            is_native_dtensor(a) for a in (*args, *kwargs.values())
        ):
            result = self._intercept(get_op_name(func), func, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)
