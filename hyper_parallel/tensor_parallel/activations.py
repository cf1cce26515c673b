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
from hyper_parallel.tensor_parallel.even import DTENSOR_SAYS, check_dim, ensure_even
from hyper_parallel.tensor_parallel.regions import GatherFromSequenceRegion

__all__ = ["deliver", "fetch", "fetch_for_shards", "is_whole", "shape_of", "stays_local", "take_apart"]


def take_apart(
    x: Any,
    mesh: DeviceMesh,
    placement: Placement,
    size: int | None = None,
    *,
    where: str = "the input",
    say: str = DTENSOR_SAYS,
) -> tuple[Tensor, Layout]:
    """The local tensor and where it lies.

    Collectives: for a plain sharded tensor that of :func:`ensure_even`, else none.

    Args:
        x: a DTensor on ``mesh``, or a plain tensor that lies as ``placement`` says.
        mesh: 1-D.
        placement: of a plain tensor.
        size: global size of the dim that ``placement`` shards; None: all ranks hold as much as this one.
        where: the module, for messages.
        say: how a caller tells ``size``, for messages.

    Raises:
        IndexError: a placement over a dim that ``x`` does not have.
        ValueError: a DTensor on another mesh, a local size that is not this rank's chunk of ``size``, or, without one,
            different local sizes.
    """
    platform = get_platform()
    if isinstance(x, DTensor):
        if x.global_layout.mesh != mesh:
            raise ValueError(
                f"{where}: the input has {x.global_layout.describe()}; expected a DTensor on {mesh.describe()}, ranks "
                f"{mesh.mesh.tolist()}, or a plain tensor"
            )
        return platform.as_local(x), x.global_layout
    shape = list(platform.shape(x))
    if isinstance(placement, Shard):
        ensure_even(x, placement.dim, mesh.get_group(), where, say, size)
    check_dim(placement, tuple(shape), where)
    placement = Layout(mesh, [placement], shape).placements[0]
    if isinstance(placement, Shard):
        own = shape[placement.dim]
        shape[placement.dim] = own * mesh.size() if size is None else size
        layout = Layout(mesh, [placement], shape)
        if layout.local_shape[placement.dim] != own:
            raise ValueError(
                f"{where}: the input has {own} elements in dim {placement.dim} on rank {mesh.get_local_rank()}; "
                f"expected {layout.local_shape[placement.dim]}, its part of {size} over {mesh.describe()}"
            )
        return x, layout
    return x, Layout(mesh, [placement], shape)


def is_whole(x: Any, placement: Placement) -> bool:
    """Whether every rank holds all of ``x``, a DTensor or a plain tensor that lies as ``placement`` says."""
    if isinstance(x, DTensor):
        return x.global_layout.is_replicated
    return isinstance(placement, Replicate)


def shape_of(x: Any) -> tuple[int, ...]:
    """Of a DTensor the global shape."""
    return x.global_layout.shape if isinstance(x, DTensor) else get_platform().shape(x)


def stays_local(x: Any, placement: Placement, wanted: Placement, where: str = "the input") -> bool:
    """Whether ``x`` is plain and is wanted where it lies: how much of it the other ranks hold does not matter.

    Raises:
        IndexError: a placement over a dim that ``x`` does not have.
    """
    if isinstance(x, DTensor):
        return False
    shape = get_platform().shape(x)
    check_dim(placement, shape, where)
    check_dim(wanted, shape, where)
    return _from_front(placement, shape) == _from_front(wanted, shape)


def _from_front(placement: Placement, shape: tuple[int, ...]) -> Placement:
    return Shard(placement.dim % len(shape)) if isinstance(placement, Shard) else placement


def fetch(
    x: Any,
    mesh: DeviceMesh,
    placement: Placement,
    wanted: Placement,
    size: int | None = None,
    where: str = "the input",
) -> Tensor:
    """The local tensor of ``x`` brought to ``wanted``. Differentiable; collectives as in redistribute, after that of
    :func:`take_apart`.

    The gradient that comes back must be the dual of ``wanted``: whole on every rank where that is Replicate.
    """
    if stays_local(x, placement, wanted, where):
        return x
    local, layout = take_apart(x, mesh, placement, size, where=where)
    return redistribute_local(local, layout, layout.replace([wanted]))


def fetch_for_shards(
    x: Any,
    mesh: DeviceMesh,
    placement: Placement,
    size: int | None = None,
    *,
    where: str = "the input",
    say: str = DTENSOR_SAYS,
) -> tuple[Tensor, bool]:
    """The whole ``x`` for work that differs between ranks, whose gradients are terms of a sum.

    Returns:
        The tensor, and whether the caller must sum its gradient over the mesh (:func:`copy_to_tp_region`).
        Where ``x`` is sharded the gather that runs here does so, by a reduce-scatter in backward.
    """
    if isinstance(placement, Replicate) and not isinstance(x, DTensor):
        return x, True
    local, layout = take_apart(x, mesh, placement, size, where=where, say=say)
    found = layout.placements[0]
    if isinstance(found, Shard):
        gather = GatherFromSequenceRegion(mesh.get_group(), found.dim, layout.shape[found.dim], checked=True)
        return gather(local), False
    return redistribute_local(local, layout, layout.replace([Replicate()])), True


def deliver(
    local: Tensor,
    layout: Layout,
    wanted: Placement,
    use_local: bool,
    where: str = "the module",
    what: str = "output",
) -> Any:
    """``local``, which lies as ``layout`` says, brought to ``wanted``: as a plain tensor or as a DTensor."""
    check_dim(wanted, layout.shape, where, what)
    target = layout.replace([wanted])
    if target != layout and layout.mesh.size() > 1:
        local = redistribute_local(local, layout, target)
    if use_local:
        return local
    return get_platform().as_dtensor(DTensor, local, target)
