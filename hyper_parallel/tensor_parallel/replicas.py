"""Weights that some ranks hold together: key and value heads when the ranks outnumber them.

Each of these ranks uses the heads for its own query heads, so the gradients they compute are terms of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.cuts import range_replicas

__all__ = ["ReplicaSum", "make_replica_sum"]


@dataclass(frozen=True, eq=False)
class ReplicaSum:
    """Identity on a weight whose gradient is summed, part by part, over the ranks that hold the same part.

    One exchange over the whole group, in which ranks that share nothing send each other nothing: a group for each
    set of replicas would have to be created by its members alone, in an order and number that differ between ranks.
    Terms are added in the order of ranks, so that replicas stay equal bit by bit.

    Attributes:
        dim: the dim that is cut.
        lengths: sizes of the parts along it.
        replicas: for each part the members of the group that hold it.
        group: all ranks that the weight is cut over.
    """

    dim: int
    lengths: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    group: Group

    def __call__(self, weight: Tensor) -> Tensor:
        return get_platform().linear_map(weight, _identity, self._sum)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaSum:
        return self

    def _sum(self, grad: Tensor) -> Tensor:
        platform = get_platform()
        parts = self._split(grad, self.lengths)
        shared = [self._shared_with(member) for member in range(self.group.size)]
        empty = platform.narrow(grad, self.dim, 0, 0)
        chunks = [platform.cat([parts[i] for i in indices], self.dim) if indices else empty for indices in shared]
        received = platform.all_to_all_uneven(chunks, [platform.shape(chunk) for chunk in chunks], self.group)
        terms: list[list[Tensor]] = [[] for _ in parts]
        for member, (indices, chunk) in enumerate(zip(shared, received)):
            if member == self.group.rank:
                indices, pieces = tuple(range(len(parts))), parts
            else:
                pieces = self._split(chunk, [self.lengths[i] for i in indices])
            for index, piece in zip(indices, pieces):
                terms[index].append(piece)
        sums = [sum(rest, start=first) for first, *rest in terms]
        return platform.cat(sums, self.dim) if len(sums) > 1 else sums[0]

    def _shared_with(self, member: int) -> tuple[int, ...]:
        """Indices of the parts that another member holds as well."""
        if member == self.group.rank:
            return ()
        return tuple(i for i, members in enumerate(self.replicas) if member in members)

    def _split(self, x: Tensor, lengths: Any) -> list[Tensor]:
        platform, start, parts = get_platform(), 0, []
        for length in lengths:
            parts.append(platform.narrow(x, self.dim, start, length))
            start += length
        return parts


def make_replica_sum(spec: ShardSpec, group: Group) -> ReplicaSum | None:
    """The sum that the gradient of a parameter cut by ``spec`` needs; None when it needs none."""
    if spec.dim is None or not spec.sum_replica_gradients:
        return None
    lengths = tuple(stop - start for start, stop in spec.ranges[group.rank])
    return ReplicaSum(spec.dim, lengths, range_replicas(spec, group.rank), group)


def _identity(x: Tensor) -> Tensor:
    return x
