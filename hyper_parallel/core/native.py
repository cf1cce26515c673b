"""Our DTensor from and to the framework's own distributed tensor. No copies; autograd goes through."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import NativeDTensor

__all__ = ["from_native", "to_native"]

_opaque = get_platform().opaque


@_opaque
def from_native(tensor: Any) -> DTensor:
    """Our view of a ``torch.distributed.tensor.DTensor``: same storage, same graph.

    Raises:
        TypeError: not a DTensor of the framework, or the framework has none.
        ValueError: a placement that has no counterpart here.

    Example:
        >>> ours = from_native(native)                  # doctest: +SKIP
    """
    platform = get_platform()
    parts = platform.take_native_dtensor(tensor)
    layout = Layout(_adopt(parts.mesh), [_placement(*p) for p in parts.placements], parts.shape)
    result: DTensor = platform.as_dtensor(DTensor, parts.local, layout)
    return result


@_opaque
def to_native(tensor: DTensor) -> Any:
    """The framework's own DTensor with the same storage and graph.

    Raises:
        TypeError: not a DTensor of ours, or the framework has no DTensor.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"to_native takes a hyper_parallel DTensor, found {type(tensor).__name__}")
    platform = get_platform()
    layout = tensor.global_layout
    placements = tuple(_describe(p) for p in layout.placements)
    return platform.make_native_dtensor(
        NativeDTensor(tensor.to_local(), platform.native_mesh(layout.mesh), placements, layout.shape)
    )


def _adopt(native: Any) -> DeviceMesh:
    """Our mesh for the framework's; remembered on its object, since finding ranks and groups costs more than a call."""
    remembered = getattr(native, "_hyper_parallel_mesh", None)
    if remembered is None:
        remembered = native._hyper_parallel_mesh = _Remembered(DeviceMesh.from_native(native))
    mesh: DeviceMesh = remembered.mesh
    return mesh


class _Remembered:
    """Holds our mesh on the framework's object, whose copies and pickles it stays out of."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _placement(kind: str, value: Any) -> Placement:
    if kind == "shard":
        return Shard(value)
    return Partial(value) if kind == "partial" else Replicate()


def _describe(p: Placement) -> tuple[str, Any]:
    if isinstance(p, Shard):
        return "shard", p.dim
    return ("partial", p.reduce_op) if isinstance(p, Partial) else ("replicate", None)
