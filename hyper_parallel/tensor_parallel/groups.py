"""Which ranks share a layer: from what users pass as ``group`` or ``mesh`` to ours."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform import Group, get_platform

__all__ = ["resolve_group", "resolve_mesh", "tensor_parallel_mesh"]


def resolve_group(group: Any) -> Group:
    """The process group meant by ``group``: a :class:`Group`, a 1-D mesh (``mesh["tp"]``, ours or the
    framework's), or a process group of the framework. No collective.

    Raises:
        TypeError: something else.
        ValueError: a mesh of several dims.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh):
        return _only_dim(group).get_group()
    if group is None:
        raise TypeError("a group is needed: the ranks that share the layer, such as mesh['tp']")
    platform = get_platform()
    try:
        return platform.adopt_group(group)
    except TypeError:
        pass
    try:
        mesh = DeviceMesh.from_native(group)
    except TypeError:
        raise TypeError(
            f"expected a process group or a 1-D mesh such as mesh['tp'], found {type(group).__name__}"
        ) from None
    return _only_dim(mesh).get_group()


def resolve_mesh(group: Any, device_type: str = "cpu") -> DeviceMesh:
    """The same ranks as a 1-D mesh; a mesh that is passed is kept. No collective."""
    if isinstance(group, DeviceMesh):
        return _only_dim(group)
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


def _only_dim(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim != 1:
        raise ValueError(f"expected a 1-D mesh such as mesh['tp'], found {mesh.describe()}")
    return mesh
