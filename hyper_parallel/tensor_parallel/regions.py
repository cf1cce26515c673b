"""Where activations enter and leave tensor-parallel work: linear maps over a group with an explicit backward.

======================  ==========================  ==========================
region                  forward                     backward
======================  ==========================  ==========================
copy to                 identity                    all-reduce (sum)
reduce from             all-reduce (sum)            identity
gather from             all-gather along ``dim``    own piece of ``dim``
scatter to              own piece of ``dim``        all-gather along ``dim``
gather from sequence    all-gather along ``dim``    reduce-scatter along ``dim``
reduce-scatter to seq.  reduce-scatter along ``dim``  all-gather along ``dim``
======================  ==========================  ==========================

A gradient of a replicated activation is the whole gradient, equal on every rank; that of a sharded one its
shard. The maps hold to that, so no gradient is ever divided by the number of ranks. (Megatron-LM, arXiv
1909.08053, section 3; sequence parallelism: arXiv 2205.05198.)

``group`` is ``mesh["tp"]``, a :class:`Group`, or a process group of the framework. In a group of one every
region is the identity. Inputs may be non-contiguous and are never modified. Backward is differentiable
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.even import Sizes, ensure_even, pieces
from hyper_parallel.tensor_parallel.groups import resolve_group

__all__ = [
    "CopyToTPRegion",
    "GatherFromSequenceRegion",
    "GatherFromTPRegion",
    "ReduceFromTPRegion",
    "ReduceScatterToSequenceRegion",
    "ScatterToTPRegion",
    "copy_to_tp_region",
    "gather_from_sequence_region",
    "gather_from_tp_region",
    "reduce_from_tp_region",
    "reduce_scatter_to_sequence_region",
    "scatter_to_tp_region",
]


def copy_to_tp_region(x: Tensor, group: Any) -> Tensor:
    """Forward: ``x`` itself, no collective. Backward: the gradient summed over the group. Before a
    column-parallel layer.

    Args:
        x: any shape, equal on all ranks.
        group: the ranks.
    """
    return CopyToTPRegion(resolve_group(group))(x)


def reduce_from_tp_region(x: Tensor, group: Any) -> Tensor:
    """Forward: ``x`` summed over the group. Backward: the gradient itself, no collective. After a
    row-parallel layer.

    Args:
        x: one term of the sum, of the same shape and dtype on all ranks. On CPU the ranks make sure of it first, by an
            all-gather of 16 bytes; on accelerators what other ranks hold is not looked at.
        group: the ranks.

    Raises:
        ValueError: other shapes or dtypes on other ranks; on all of them.
    """
    return ReduceFromTPRegion(resolve_group(group))(x)


def gather_from_tp_region(x: Tensor, group: Any, dim: int = -1, *, size: Sizes = None) -> Tensor:
    """Forward: the ranks' pieces joined along ``dim``. Backward: the own piece of the gradient, no
    collective.

    Args:
        x: this rank's piece.
        group: the ranks.
        dim: the dim to join along.
        size: the joined size of ``dim``, cut in ``torch.chunk`` sizes; or the size of each rank's piece;
            None: all pieces are as large as this one. On CPU the ranks make sure of it first, by an all-gather
            of 16 bytes; on accelerators what other ranks hold is not looked at.

    Raises:
        ValueError: ``size`` does not fit ``x`` or the group, or pieces of different shapes; on all ranks.
        IndexError: ``x`` has no ``dim``.

    Example:
        >>> logits = gather_from_tp_region(local_logits, mesh["tp"], size=32003)      # doctest: +SKIP
    """
    return GatherFromTPRegion(resolve_group(group), dim, size)(x)


def scatter_to_tp_region(x: Tensor, group: Any, dim: int = -1, *, size: Sizes = None) -> Tensor:
    """Forward: the own piece of ``dim``, no collective. Backward: the ranks' gradients joined along ``dim``.

    Args:
        x: equal on all ranks.
        group: the ranks.
        dim: the dim to cut.
        size: the size of each rank's piece; by default ``torch.chunk`` sizes.
    """
    return ScatterToTPRegion(resolve_group(group), dim, size)(x)


def gather_from_sequence_region(x: Tensor, group: Any, dim: int = 1, *, size: Sizes = None) -> Tensor:
    """Forward: the ranks' pieces joined along ``dim``. Backward: the gradients summed, own piece kept
    (reduce-scatter).

    Unlike :func:`gather_from_tp_region`, for work that differs between ranks: before a column-parallel
    layer whose input is sharded over the sequence. Arguments as there.
    """
    return GatherFromSequenceRegion(resolve_group(group), dim, size)(x)


def reduce_scatter_to_sequence_region(x: Tensor, group: Any, dim: int = 1, *, size: Sizes = None) -> Tensor:
    """Forward: ``x`` summed over the group, own piece of ``dim`` kept. Backward: the gradients joined along
    ``dim``.

    After a row-parallel layer whose output is sharded over the sequence. Arguments as in
    :func:`scatter_to_tp_region`. On CPU the ranks make sure that their shapes are equal, by an all-gather of 16 bytes.
    """
    return ReduceScatterToSequenceRegion(resolve_group(group), dim, size)(x)


@dataclass(frozen=True, eq=False)
class _Region:
    """A linear map over a group; ``forward`` and ``backward`` are plain collectives, calling it is
    differentiable.
    """

    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return x
        bound = self._bind(x)
        return get_platform().linear_map(x, bound.forward, bound.backward, bound.again)

    @classmethod
    def apply(cls, x: Tensor, group: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Called like an autograd function."""
        return cls(resolve_group(group), *args, **kwargs)(x)

    def _bind(self, x: Tensor) -> Any:
        return self

    def again(self, x: Tensor) -> Tensor:
        """The gradient of ``backward``; where forward adds up terms it is not ``forward``, as gradients are whole."""
        result: Tensor = self.forward(x)  # type: ignore[attr-defined]
        return result


@dataclass(frozen=True, eq=False)
class CopyToTPRegion(_Region):
    """See :func:`copy_to_tp_region`."""

    def forward(self, x: Tensor) -> Tensor:
        """Identity."""
        return x

    def backward(self, grad: Tensor) -> Tensor:
        """All-reduce."""
        return get_platform().all_reduce(grad, "sum", self.group)


@dataclass(frozen=True, eq=False)
class ReduceFromTPRegion(_Region):
    """See :func:`reduce_from_tp_region`."""

    checked: bool = False
    """That all ranks hold as much needs no question."""

    def _bind(self, x: Tensor) -> Any:
        if not self.checked:
            ensure_even(x, None, self.group, type(self).__name__)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """All-reduce."""
        return get_platform().all_reduce(x, "sum", self.group)

    def backward(self, grad: Tensor) -> Tensor:
        """Identity."""
        return grad

    def again(self, x: Tensor) -> Tensor:
        """Identity."""
        return x


@dataclass(frozen=True, eq=False)
class _DimRegion(_Region):
    dim: int = -1
    size: Sizes = None
    checked: bool = False
    """That ``size`` is what the ranks hold needs no question."""

    def _bind(self, x: Tensor) -> Any:
        """The same region with ``dim`` counted from the front and ``size`` spelt out per rank."""
        shape = get_platform().shape(x)
        if not self.checked:
            self._check_others(x)
        if not -len(shape) <= self.dim < len(shape):
            raise IndexError(f"{type(self).__name__} along dim {self.dim} of a tensor of shape {shape}")
        dim = self.dim % len(shape)
        sizes = self._sizes(shape[dim])
        if len(sizes) != self.group.size or any(s < 0 for s in sizes):
            raise ValueError(f"size={self.size} does not give each of {self.group.size} ranks its piece")
        self._check(shape, dim, sizes)
        return type(self)(self.group, dim, sizes)

    def _sizes(self, own: int) -> tuple[int, ...]:
        raise NotImplementedError

    def _check(self, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> None:
        raise NotImplementedError

    def _check_others(self, x: Tensor) -> None:
        """Whether all ranks hold what the map takes for granted, before it sends anything."""

    # ``dim`` and ``size`` are bound in what follows

    def _join(self, x: Tensor) -> Tensor:
        return get_platform().all_gather_uneven(x, self.dim, self.size, self.group)  # type: ignore[arg-type]

    def _own_piece(self, x: Tensor) -> Tensor:
        start = sum(self.size[: self.group.rank])  # type: ignore[index]
        return get_platform().narrow(x, self.dim, start, self.size[self.group.rank])  # type: ignore[index]

    def _sum_own_piece(self, x: Tensor) -> Tensor:
        return get_platform().reduce_scatter_uneven(x, self.dim, self.size, self.group)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class _Joining(_DimRegion):
    def _check_others(self, x: Tensor) -> None:
        ensure_even(x, self.dim, self.group, type(self).__name__, "size={lengths}", self.size)

    def _sizes(self, own: int) -> tuple[int, ...]:
        return (own,) * self.group.size if self.size is None else pieces(self.size, self.group.size)

    def _check(self, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> None:
        if shape[dim] != sizes[self.group.rank]:
            raise ValueError(
                f"rank {self.group.rank} has {shape[dim]} elements in dim {dim} (shape {shape}), but "
                f"size={self.size} gives it {sizes[self.group.rank]} of {sizes}"
            )


@dataclass(frozen=True, eq=False)
class _Cutting(_DimRegion):
    def _sizes(self, own: int) -> tuple[int, ...]:
        return pieces(own if self.size is None or isinstance(self.size, int) else self.size, self.group.size)

    def _check(self, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> None:
        if shape[dim] != sum(sizes) or (isinstance(self.size, int) and self.size != shape[dim]):
            raise ValueError(f"dim {dim} of shape {shape} cannot be cut into size={self.size}")


@dataclass(frozen=True, eq=False)
class GatherFromTPRegion(_Joining):
    """See :func:`gather_from_tp_region`."""

    forward = _DimRegion._join
    backward = _DimRegion._own_piece


@dataclass(frozen=True, eq=False)
class ScatterToTPRegion(_Cutting):
    """See :func:`scatter_to_tp_region`."""

    forward = _DimRegion._own_piece
    backward = _DimRegion._join


@dataclass(frozen=True, eq=False)
class GatherFromSequenceRegion(_Joining):
    """See :func:`gather_from_sequence_region`."""

    forward = _DimRegion._join
    backward = _DimRegion._sum_own_piece


@dataclass(frozen=True, eq=False)
class ReduceScatterToSequenceRegion(_Cutting):
    """See :func:`reduce_scatter_to_sequence_region`."""

    def _check_others(self, x: Tensor) -> None:
        ensure_even(x, None, self.group, type(self).__name__, told=self.size)

    forward = _DimRegion._sum_own_piece
    backward = _DimRegion._join
    again = _DimRegion._own_piece
