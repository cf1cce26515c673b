"""DeviceMesh: ranks arranged in named dims, with a process group for each dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform import Group, Platform, get_platform

__all__ = ["DeviceMesh", "init_device_mesh"]


class DeviceMesh:
    """An N-dimensional arrangement of ranks; each dim has a process group for every line of ranks along it.

    Creating one is collective over all processes. Sub-meshes (``mesh["tp"]``) share the groups of their parent.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        mesh: array of distinct global ranks.
        mesh_dim_names: one name per dim, if wanted.
        groups: groups to use for this rank's lines, one per dim, instead of creating some.

    Raises:
        ValueError: ranks that repeat, do not exist or do not ascend along each dim, names that repeat or do not fit the
            number of dims.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> mesh["tp"].size()
        1
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        groups: Sequence[Group] | None = None,
    ) -> None:
        self.device_type = device_type
        self.mesh = np.asarray(mesh, dtype=np.int64)
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self._native: Any = None
        self.generators_agree = False  # see core.random
        self._check()
        platform = get_platform()
        if groups is None:
            platform.ensure_initialized(device_type)
            self._check_world(platform)
            groups = _create_groups(platform, self.mesh)
        rank = platform.rank()
        self.coordinate: tuple[int, ...] = self.coordinate_of(rank) if rank in self.mesh else ()
        self._groups = tuple(groups)
        self._key = (device_type, self.mesh.shape, tuple(self.mesh.ravel().tolist()), self.mesh_dim_names)
        self._hash = hash(self._key)

    def _check(self) -> None:
        if self.mesh.ndim == 0 or self.mesh.size == 0:
            raise ValueError(f"a mesh needs at least one dim and one rank, found shape {self.mesh.shape}")
        flat = self.mesh.ravel().tolist()
        if len(set(flat)) != len(flat):
            raise ValueError(f"ranks of a mesh must be distinct, found {flat}")
        for dim in range(self.mesh.ndim):
            if (np.diff(self.mesh, axis=dim) < 0).any():  # process groups are ordered by rank
                raise ValueError(f"ranks along each mesh dim must ascend, found {self.mesh.tolist()}")
        names = self.mesh_dim_names
        if names is not None and (len(names) != self.mesh.ndim or len(set(names)) != len(names)):
            raise ValueError(f"mesh_dim_names {names} must be {self.mesh.ndim} distinct names, one per mesh dim")

    def _check_world(self, platform: Platform) -> None:
        world = platform.world_size()
        bad = [r for r in self.mesh.ravel().tolist() if not 0 <= r < world]
        if bad:
            raise ValueError(f"mesh of shape {self.mesh.shape} names ranks {bad}, but the job has {world} processes")

    # -- queries, named as in PyTorch -----------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of mesh dims."""
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each dim."""
        return self.mesh.shape

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Ranks along one dim, or in all."""
        return int(self.mesh.size) if mesh_dim is None else self.shape[self.dim_index(mesh_dim)]

    def dim_index(self, mesh_dim: int | str) -> int:
        """Position of a mesh dim given by name or number."""
        if isinstance(mesh_dim, str):
            if self.mesh_dim_names is None or mesh_dim not in self.mesh_dim_names:
                raise KeyError(f"no mesh dim {mesh_dim!r} in {self.describe()}")
            return self.mesh_dim_names.index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise IndexError(f"mesh dim {mesh_dim} is out of range for {self.describe()}")
        return mesh_dim % self.ndim

    def get_group(self, mesh_dim: int | str | None = None) -> Group:
        """This rank's process group along ``mesh_dim`` (may be left out on a 1-D mesh)."""
        if mesh_dim is None:
            if self.ndim != 1:
                raise ValueError(f"get_group needs a mesh dim on {self.describe()}")
            mesh_dim = 0
        if not self.coordinate:
            raise ValueError(f"this process (rank {get_platform().rank()}) is not part of {self.describe()}")
        return self._groups[self.dim_index(mesh_dim)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's position along ``mesh_dim``."""
        return self.get_group(mesh_dim).rank

    def get_coordinate(self) -> list[int] | None:
        """This rank's position along every dim; None when it is not part of the mesh."""
        return list(self.coordinate) if self.coordinate else None

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """Position of a global rank along every dim."""
        found = np.argwhere(self.mesh == rank)
        if len(found) == 0:
            raise ValueError(f"rank {rank} is not part of {self.describe()}")
        return tuple(int(i) for i in found[0])

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh over the named dims that holds this rank; shares the groups."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        dims = [self.dim_index(n) for n in wanted]
        if len(set(dims)) != len(dims):
            raise ValueError(f"mesh dims {wanted} repeat")
        index: list[Any] = [slice(None) if d in dims else c for d, c in enumerate(self.coordinate)]
        if not self.coordinate:
            raise ValueError(f"this process (rank {get_platform().rank()}) is not part of {self.describe()}")
        kept = sorted(dims)
        ranks = np.transpose(self.mesh[tuple(index)], [kept.index(d) for d in dims])
        return DeviceMesh(
            self.device_type, ranks, mesh_dim_names=wanted, groups=[self._groups[d] for d in dims]
        )

    # -- from what exists ---------------------------------------------------------------------------------------------

    @classmethod
    def from_native(cls, mesh: Any) -> DeviceMesh:
        """Adopt the framework's own mesh (``torch.distributed.DeviceMesh``); no group is created."""
        native = get_platform().describe_native_mesh(mesh)
        out = cls(native.device_type, native.ranks, mesh_dim_names=native.dim_names, groups=native.groups)
        out._native = mesh
        return out

    @classmethod
    def from_group(cls, group: Any, device_type: str, *, mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
        """A 1-D mesh over an existing process group; no group is created."""
        adopted = group if isinstance(group, Group) else get_platform().adopt_group(group)
        return cls(device_type, list(adopted.ranks), mesh_dim_names=mesh_dim_names, groups=[adopted])

    # -- value semantics ----------------------------------------------------------------------------------------------

    @property
    def dim_labels(self) -> tuple[str, ...]:
        """Names of the dims, or ``dim0, dim1, ...``."""
        return self.mesh_dim_names or tuple(f"dim{i}" for i in range(self.ndim))

    def describe(self) -> str:
        """``mesh (dp=2, tp=2)``."""
        return "mesh (" + ", ".join(f"{n}={s}" for n, s in zip(self.dim_labels, self.shape, strict=True)) + ")"

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}, mesh_dim_names={self.mesh_dim_names})"

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DeviceMesh) and self._key == other._key)


def _create_groups(platform: Platform, mesh: np.ndarray) -> list[Group]:
    groups = []
    for dim in range(mesh.ndim):
        lines = np.moveaxis(mesh, dim, -1).reshape(-1, mesh.shape[dim])
        groups.append(platform.create_group([tuple(int(r) for r in line) for line in lines]))
    return groups


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Arrange all processes of the job in a mesh; collective. The default process group is initialised if need be.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        mesh_shape: ranks along each dim; their product must be the number of processes.
        mesh_dim_names: one name per dim.

    Raises:
        ValueError: the shape does not multiply to the number of processes; all factors are named.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")).describe()
        'mesh (dp=1, tp=1)'
    """
    platform = get_platform()
    platform.ensure_initialized(device_type)
    shape = tuple(int(s) for s in mesh_shape)
    world = platform.world_size()
    if int(np.prod(shape)) != world or any(s < 1 for s in shape):
        factors = " * ".join(map(str, shape)) or "()"
        raise ValueError(f"mesh shape {factors} = {int(np.prod(shape))} must use all {world} processes of the job")
    return DeviceMesh(device_type, np.arange(world).reshape(shape), mesh_dim_names=mesh_dim_names)
