"""How a tensor is cut: the one place where index ranges of ranks come from.

Activations (:class:`~hyper_parallel.core.layout.Layout`), parameters, checkpoints and gradient norms all ask here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Range", "ShardSpec", "chunk_ranges"]

Range = tuple[int, int]


@lru_cache(maxsize=4096)
def chunk_ranges(size: int, parts: int) -> tuple[Range, ...]:
    """Index ranges ``[start, stop)`` of ``parts`` ranks over ``size`` elements, as ``torch.chunk`` cuts.

    Chunks are ``ceil(size / parts)`` long; the last one may be shorter, and trailing ranks may be empty.

    Example:
        >>> chunk_ranges(5, 4)
        ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    if parts < 1:
        raise ValueError(f"cannot cut into {parts} parts; expected at least 1")
    if size < 0:
        raise ValueError(f"cannot cut a size of {size}; expected 0 or more")
    length = -(-size // parts)
    return tuple((min(i * length, size), min((i + 1) * length, size)) for i in range(parts))


@dataclass(frozen=True)
class ShardSpec:
    """How one parameter is cut over one group of ranks.

    Attributes:
        shape: the whole tensor's shape.
        dim: the dim that is cut; None when every rank holds the whole.
        ranges: for each rank, the index ranges of ``dim`` it holds, in local order. Several ranges describe fused
            weights (q/k/v, gate/up), whose parts are each cut on their own. Equal ranges on several ranks are replicas.
        sum_replica_gradients: whether the gradients that replicas compute are terms of one sum (True: key/value heads
            shared by several ranks) or already equal (False).

    Example:
        >>> ShardSpec.chunk((5, 3), 0, 2).local_shape(1)
        (2, 3)
    """

    shape: tuple[int, ...]
    dim: int | None
    ranges: tuple[tuple[Range, ...], ...]
    sum_replica_gradients: bool = False

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(f"cannot cut dim {self.dim} of shape {self.shape}")
        size = self.shape[self.dim]
        for rank, parts in enumerate(self.ranges):
            for start, stop in parts:
                if not 0 <= start <= stop <= size:
                    raise ValueError(f"rank {rank} holds [{start}, {stop}) of dim {self.dim}, which has size {size}")

    @classmethod
    def replicated(cls, shape: tuple[int, ...], ranks: int) -> ShardSpec:
        """Every one of ``ranks`` ranks holds the whole tensor."""
        return cls(tuple(shape), None, ((),) * ranks)

    @classmethod
    def chunk(cls, shape: tuple[int, ...], dim: int, ranks: int) -> ShardSpec:
        """Dim ``dim`` in ``torch.chunk`` sizes over ``ranks`` ranks."""
        dim = dim % len(shape) if shape else dim
        return cls(tuple(shape), dim, tuple((r,) for r in chunk_ranges(shape[dim], ranks)))

    @property
    def num_ranks(self) -> int:
        """How many ranks the description covers."""
        return len(self.ranges)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape that ``rank`` holds."""
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges[rank])
        return self.shape[: self.dim] + (length,) + self.shape[self.dim + 1 :]

    def slices(self, rank: int) -> tuple[tuple[slice, ...], ...]:
        """Index expressions into the whole tensor; concatenated along ``dim`` they give what ``rank`` holds."""
        whole = (slice(None),) * len(self.shape)
        if self.dim is None:
            return (whole,)
        return tuple(
            whole[: self.dim] + (slice(start, stop),) + whole[self.dim + 1 :] for start, stop in self.ranges[rank]
        )

    def owner(self, rank: int) -> int:
        """The lowest rank that holds exactly what ``rank`` holds; norms and savers count a replica once."""
        return self.ranges.index(self.ranges[rank])
