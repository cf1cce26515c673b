"""Which ranks work together: from what users pass as ``group`` to ours."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform import Group, get_platform

__all__ = ["only_dim", "resolve_group"]


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
        return only_dim(group).get_group()
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
    return only_dim(mesh).get_group()


def only_dim(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself, if it has one dim.

    Raises:
        ValueError: it has several.
    """
    if mesh.ndim != 1:
        raise ValueError(f"expected a 1-D mesh such as mesh['tp'], found {mesh.describe()}")
    return mesh
