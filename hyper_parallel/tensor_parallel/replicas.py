"""Weights that some ranks hold together: key and value heads when the ranks outnumber them.

Each of these ranks uses the heads for its own query heads, so the gradients they compute are terms of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.cuts import range_replicas

__all__ = ["ReplicaSum", "SubgroupMaker", "make_replica_sum"]

SubgroupMaker = Callable[[Sequence[int]], Group]
"""From members (indices in the tensor-parallel group) to their group; collective over the members."""


@dataclass(frozen=True, eq=False)
class ReplicaSum:
    """Identity on a weight whose gradient is summed, part by part, over the ranks that hold the same part.

    Attributes:
        dim: the dim that is cut.
        lengths: sizes of the parts along it.
        groups: for each part the ranks that hold it.
    """

    dim: int
    lengths: tuple[int, ...]
    groups: tuple[Group, ...]

    def __call__(self, weight: Tensor) -> Tensor:
        return get_platform().linear_map(weight, _identity, self._sum)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaSum:
        return self

    def _sum(self, grad: Tensor) -> Tensor:
        platform = get_platform()
        parts, start = [], 0
        for length, group in zip(self.lengths, self.groups):
            part = platform.narrow(grad, self.dim, start, length)
            parts.append(platform.all_reduce(part, "sum", group) if group.size > 1 else part)
            start += length
        return platform.cat(parts, self.dim) if len(parts) > 1 else parts[0]


def make_replica_sum(spec: ShardSpec, rank: int, subgroup: SubgroupMaker) -> ReplicaSum | None:
    """The sum that the gradient of a parameter cut by ``spec`` needs; None when it needs none."""
    if spec.dim is None or not spec.sum_replica_gradients:
        return None
    lengths = tuple(stop - start for start, stop in spec.ranges[rank])
    return ReplicaSum(spec.dim, lengths, tuple(subgroup(members) for members in range_replicas(spec, rank)))


def _identity(x: Tensor) -> Tensor:
    return x
