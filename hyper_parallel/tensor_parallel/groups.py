"""Which ranks share a layer: from what users pass as ``group`` or ``mesh`` to ours."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.process_group import only_dim, resolve_group

__all__ = ["resolve_group", "resolve_mesh", "tensor_parallel_mesh"]


def resolve_mesh(group: Any, device_type: str = "cpu") -> DeviceMesh:
    """The same ranks as a 1-D mesh; a mesh that is passed is kept. No collective."""
    if isinstance(group, DeviceMesh):
        return only_dim(group)
    return DeviceMesh.from_group(resolve_group(group), device_type, mesh_dim_names=("tp",))


def tensor_parallel_mesh(mesh: Any) -> DeviceMesh:
    """The 1-D mesh of the ranks that share layers: ``mesh`` itself, or its dim ``"tp"``.

    Raises:
        TypeError: not a mesh.
        ValueError: several dims, none of them called ``"tp"``.
    """
    found = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.from_native(mesh)
    if found.ndim == 1:
        return found
    if "tp" not in (found.mesh_dim_names or ()):
        raise ValueError(f"expected a 1-D mesh or one with a dim named 'tp', found {found.describe()}")
    return found["tp"]
