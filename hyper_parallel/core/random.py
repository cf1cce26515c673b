"""Random numbers on a mesh: one stream for all ranks, mixed with the place of a shard."""

from __future__ import annotations

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["agree_on_generator", "shard_index", "shard_seed"]

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: multiples of it are spread evenly
_SEED_BITS = 62


def shard_seed(layout: Layout, like: Tensor) -> int:
    """Draw one number from the default generator and make of it this rank's seed for a tensor with ``layout``.

    Ranks that hold the same part get the same seed, ranks that hold different parts get different ones. The default
    generator moves on by one draw on every rank, so restoring its state (activation checkpointing) replays the seed.

    Args:
        layout: of the tensor that is drawn.
        like: a tensor on the device that collectives of the mesh use.

    Collectives: on the first call of a mesh, see :func:`agree_on_generator`.
    """
    agree_on_generator(layout.mesh, like)
    drawn = get_platform().draw_seed()
    return (drawn + shard_index(layout) * _GOLDEN) % 2**_SEED_BITS


def shard_index(layout: Layout) -> int:
    """A number for this rank's part: its coordinates along the mesh dims that shard, read as one number."""
    index = 0
    for m, p in enumerate(layout.placements):
        if isinstance(p, Shard):
            index = index * layout.mesh.shape[m] + layout.mesh.coordinate[m]
    return index


def agree_on_generator(mesh: DeviceMesh, like: Tensor) -> None:
    """Make sure, once per mesh, that the default generators of all its ranks are in one state.

    What each rank would draw next is compared; ranks seeded alike keep their streams. Where they differ, all take a
    seed from the first rank of the mesh. (Inside activation checkpointing the recomputation would then start from
    another state; seed all ranks alike.)

    Collectives: one all-gather of a number for each mesh dim; where the states differ, one broadcast for each.
    """
    if mesh.generators_agree:
        return
    platform = get_platform()
    own = platform.peek_seed()
    seen, agreed = own, True
    for m in range(mesh.ndim):
        numbers = platform.to_numpy(platform.all_gather(_tensor(seen, like), mesh.get_group(m)))
        agreed = agreed and bool((numbers == seen).all())
        seen = own if agreed else -1  # -1 is no draw: the lines of the next dim hear of it
    if not agreed:
        seed = _tensor(own, like)
        for m in range(mesh.ndim):
            seed = platform.broadcast(seed, 0, mesh.get_group(m))
        platform.set_seed(int(platform.to_numpy(seed)[0]))
    mesh.generators_agree = True


def _tensor(number: int, like: Tensor) -> Tensor:
    return get_platform().from_numpy(np.array([number], dtype=np.int64), like)
