"""Shard, Replicate, Partial: how one mesh dim treats a tensor. Plain values, names as in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Partial", "Placement", "Replicate", "Shard"]

_REDUCE_OPS = ("sum", "max", "min")


class Placement:
    """What one mesh dim does to a tensor: :class:`Shard`, :class:`Replicate` or :class:`Partial`."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a ``Shard`` (of ``dim``, when given)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether this is ``Replicate``."""
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        """Whether this is a ``Partial``."""
        return isinstance(self, Partial)


@dataclass(frozen=True)
class Shard(Placement):
    """Tensor dim ``dim`` is cut over the mesh dim, in ``torch.chunk`` sizes (the last ranks may hold less, or nothing).

    Args:
        dim: the tensor dim; negative counts from the end and is resolved once the tensor's rank is known.
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"Shard(dim) takes an integer, found {self.dim!r}")

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank of the mesh dim holds the same values."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank holds a term; the value is their ``reduce_op`` over the mesh dim.

    Args:
        reduce_op: ``"sum"`` (differentiable), ``"max"`` or ``"min"``.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in _REDUCE_OPS:
            raise ValueError(f"Partial(reduce_op) must be one of {_REDUCE_OPS}, found {self.reduce_op!r}")

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"
