"""Layout: a mesh, one placement per mesh dim and a global shape; from it every rank's local shape and offset."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard_spec import Range, chunk_ranges

__all__ = ["Layout"]


class Layout:
    """How a global tensor lies on a mesh: an immutable, hashable value.

    When several mesh dims shard one tensor dim, the first mesh dim cuts first and the next cuts each piece again.

    Args:
        mesh: the :class:`DeviceMesh`.
        placements: one per mesh dim; ``Shard(-1)`` is resolved against ``shape``.
        shape: the global shape.

    Raises:
        ValueError: number of placements differs from the mesh's dims, or sums and extrema are mixed.
        IndexError: a sharded dim that the shape does not have.

    Example:
        >>> layout = Layout(mesh, [Shard(-1)], (4, 10))      # doctest: +SKIP
        >>> layout.local_shape, layout.local_offset          # doctest: +SKIP
        ((4, 5), (0, 0))
    """

    __slots__ = ("mesh", "placements", "shape", "_hash", "__dict__")

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"expected hyper_parallel's DeviceMesh, found {mesh!r} of {_owner(mesh)}; "
                "DeviceMesh.from_native(mesh) adopts the framework's own"
            )
        if isinstance(placements, Placement):
            raise TypeError(f"expected a list with a placement for each dim of the mesh, found {placements!r} alone")
        self.mesh = mesh
        self.shape = tuple(int(s) for s in shape)
        self.placements = _normalize(mesh, tuple(placements), self.shape)
        self._hash = hash((mesh, self.placements, self.shape))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Layout)
            and self._hash == other._hash
            and self.shape == other.shape
            and self.placements == other.placements
            and self.mesh == other.mesh
        )

    def __repr__(self) -> str:
        return f"Layout({self.describe()})"

    def describe(self) -> str:
        """One readable line: ``shape (4, 10), S(1)@tp on mesh (tp=2)``."""
        return f"shape {self.shape}, {self.describe_placements()} on {self.mesh.describe()}"

    def describe_placements(self) -> str:
        """``S(1)@tp`` for each mesh dim."""
        names = self.mesh.dim_labels
        return ", ".join(f"{p}@{n}" for p, n in zip(self.placements, names, strict=True))

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every mesh dim replicates."""
        return all(isinstance(p, Replicate) for p in self.placements)

    @cached_property
    def has_partial(self) -> bool:
        """Whether some mesh dim holds terms that are still to be reduced."""
        return any(p.is_partial() for p in self.placements)

    @cached_property
    def gradient_layout(self) -> Layout:
        """Layout of the gradient of a tensor that lies like this: every term of a Partial gets the whole gradient."""
        if not self.has_partial:
            return self
        return self.replace(placements=[Replicate() if p.is_partial() else p for p in self.placements])

    @cached_property
    def tensor_map(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor dim, the mesh dims that shard it, outermost first."""
        return tuple(
            tuple(m for m, p in enumerate(self.placements) if p.is_shard(d)) for d in range(len(self.shape))
        )

    @classmethod
    def from_tensor_map(
        cls, mesh: DeviceMesh, tensor_map: Sequence[Sequence[int] | int | None], shape: Sequence[int]
    ) -> Layout:
        """Build from the inverse description: for each tensor dim the mesh dim (or dims, ascending) that shard it."""
        placements: list[Placement] = [Replicate()] * mesh.ndim
        for dim, entry in enumerate(tensor_map):
            mesh_dims = () if entry is None else (entry,) if isinstance(entry, int) else tuple(entry)
            if list(mesh_dims) != sorted(set(mesh_dims)):
                raise ValueError(f"tensor dim {dim} names mesh dims {mesh_dims}; expected ascending, each once")
            for m in mesh_dims:
                if isinstance(placements[m], Shard):
                    raise ValueError(f"mesh dim {m} shards tensor dims {placements[m]} and {dim}; it can shard one")
                placements[m] = Shard(dim)
        return cls(mesh, placements, shape)

    def replace(
        self, placements: Sequence[Placement] | None = None, shape: Sequence[int] | None = None
    ) -> Layout:
        """A copy with other placements or another shape."""
        return Layout(
            self.mesh,
            self.placements if placements is None else placements,
            self.shape if shape is None else shape,
        )

    def local_ranges(self, rank: int | None = None) -> tuple[Range, ...]:
        """For each tensor dim the range ``[start, stop)`` of global indices that ``rank`` holds (default: this one)."""
        coordinate = self.mesh.coordinate if rank is None else self.mesh.coordinate_of(rank)
        ranges = []
        for dim, mesh_dims in enumerate(self.tensor_map):
            start, stop = 0, self.shape[dim]
            for m in mesh_dims:
                lo, hi = chunk_ranges(stop - start, self.mesh.shape[m])[coordinate[m]]
                start, stop = start + lo, start + hi
            ranges.append((start, stop))
        return tuple(ranges)

    @cached_property
    def _own_ranges(self) -> tuple[Range, ...]:
        return self.local_ranges()

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape that this rank holds."""
        return tuple(stop - start for start, stop in self._own_ranges)

    @cached_property
    def local_offset(self) -> tuple[int, ...]:
        """Where this rank's part starts in the global tensor."""
        return tuple(start for start, _ in self._own_ranges)

    def chunk_sizes(self, mesh_dim: int) -> tuple[int, ...]:
        """Sizes, along the tensor dim that ``mesh_dim`` shards, held by the ranks of this rank's group of ``mesh_dim``.

        Only defined where no inner mesh dim shards the same tensor dim.
        """
        placement = self.placements[mesh_dim]
        if not isinstance(placement, Shard):
            raise ValueError(f"mesh dim {mesh_dim} of {self!r} does not shard; found {placement}")
        size = self.shape[placement.dim]
        for m in self.tensor_map[placement.dim]:
            sizes = tuple(hi - lo for lo, hi in chunk_ranges(size, self.mesh.shape[m]))
            if m == mesh_dim:
                return sizes
            size = sizes[self.mesh.coordinate[m]]
        raise ValueError(f"mesh dim {mesh_dim} is not in the tensor map of {self!r}")


def _owner(thing: object) -> str:
    """The package of its class: PyTorch's meshes and placements have the same names."""
    return type(thing).__module__.partition(".")[0]


def _normalize(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> tuple[Placement, ...]:
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{len(placements)} placements {tuple(map(str, placements))} for {mesh.describe()}; "
            f"expected one for each of its {mesh.ndim} dims"
        )
    out: list[Placement] = []
    for p in placements:
        if not isinstance(p, Placement):
            raise TypeError(
                f"expected hyper_parallel's Shard, Replicate or Partial as placement, found {p!r} of {_owner(p)}"
            )
        if isinstance(p, Shard):
            if not -len(shape) <= p.dim < len(shape):
                raise IndexError(f"{p} shards a dim that shape {shape} does not have")
            p = Shard(p.dim % len(shape))
        out.append(p)
    kinds = {p.reduce_op for p in out if isinstance(p, Partial)}
    if len(kinds) > 1:  # the value would depend on which is reduced first
        raise ValueError(f"placements {tuple(map(str, placements))} hold Partial of two kinds; expected one")
    return tuple(out)
