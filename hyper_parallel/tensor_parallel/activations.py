"""Activations on their way in and out of a module: plain local tensors or DTensors, from one placement to
another.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.redistribute import redistribute_local
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.regions import GatherFromSequenceRegion

__all__ = ["deliver", "fetch", "fetch_for_shards", "is_whole", "take_apart"]


def take_apart(
    x: Any, mesh: DeviceMesh, placement: Placement, size: int | None = None
) -> tuple[Tensor, Layout]:
    """The local tensor and where it lies. No collective.

    Args:
        x: a DTensor on ``mesh``, or a plain tensor that lies as ``placement`` says.
        mesh: 1-D.
        placement: of a plain tensor.
        size: global size of the dim that ``placement`` shards; None: all ranks hold as much as this one.

    Raises:
        ValueError: a DTensor on another mesh, or a local size that is not this rank's chunk of ``size``.
    """
    platform = get_platform()
    if isinstance(x, DTensor):
        if x.global_layout.mesh != mesh:
            raise ValueError(
                f"the input has {x.global_layout.describe()}; expected a DTensor on {mesh.describe()}, ranks "
                f"{mesh.mesh.tolist()}, or a plain tensor"
            )
        return platform.as_local(x), x.global_layout
    shape = list(platform.shape(x))
    placement = Layout(mesh, [placement], shape).placements[0]
    if isinstance(placement, Shard):
        own = shape[placement.dim]
        shape[placement.dim] = own * mesh.size() if size is None else size
        layout = Layout(mesh, [placement], shape)
        if layout.local_shape[placement.dim] != own:
            raise ValueError(
                f"the input has {own} elements in dim {placement.dim} on rank {mesh.get_local_rank()}; "
                f"expected {layout.local_shape[placement.dim]}, its part of {size} over {mesh.describe()}"
            )
        return x, layout
    return x, Layout(mesh, [placement], shape)


def is_whole(x: Any, placement: Placement) -> bool:
    """Whether every rank holds all of ``x``, a DTensor or a plain tensor that lies as ``placement`` says."""
    if isinstance(x, DTensor):
        return x.global_layout.is_replicated
    return isinstance(placement, Replicate)


def fetch(
    x: Any, mesh: DeviceMesh, placement: Placement, wanted: Placement, size: int | None = None
) -> Tensor:
    """The local tensor of ``x`` brought to ``wanted``. Differentiable; collectives as in redistribute.

    The gradient that comes back must be the dual of ``wanted``: whole on every rank where that is Replicate.
    """
    if isinstance(placement, Replicate) and isinstance(wanted, Replicate) and not isinstance(x, DTensor):
        return x
    local, layout = take_apart(x, mesh, placement, size)
    return redistribute_local(local, layout, layout.replace([wanted]))


def fetch_for_shards(
    x: Any, mesh: DeviceMesh, placement: Placement, size: int | None = None
) -> tuple[Tensor, bool]:
    """The whole ``x`` for work that differs between ranks, whose gradients are terms of a sum.

    Returns:
        The tensor, and whether the caller must sum its gradient over the mesh (:func:`copy_to_tp_region`).
        Where ``x`` is sharded the gather that runs here does so, by a reduce-scatter in backward.
    """
    if isinstance(placement, Replicate) and not isinstance(x, DTensor):
        return x, True
    local, layout = take_apart(x, mesh, placement, size)
    found = layout.placements[0]
    if isinstance(found, Shard):
        gather = GatherFromSequenceRegion(mesh.get_group(), found.dim, layout.shape[found.dim])
        return gather(local), False
    return redistribute_local(local, layout, layout.replace([Replicate()])), True


def deliver(local: Tensor, layout: Layout, wanted: Placement, use_local: bool) -> Any:
    """``local``, which lies as ``layout`` says, brought to ``wanted``: as a plain tensor or as a DTensor."""
    target = layout.replace([wanted])
    if target != layout and layout.mesh.size() > 1:
        local = redistribute_local(local, layout, target)
    if use_local:
        return local
    return get_platform().as_dtensor(DTensor, local, target)
