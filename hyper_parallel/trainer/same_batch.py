"""A cheap check of what training rests on: the ranks of a tensor-parallel group see the same batch."""

from __future__ import annotations

import zlib

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.data import Batch

__all__ = ["check_same_batch"]


def check_same_batch(batch: Batch, mesh: DeviceMesh) -> None:
    """Compare checksums. One small all-gather per mesh dim.

    Raises:
        ValueError: the same on all ranks of the mesh: ranks of a tp group have different batches, or a batch has
            another shape than those of the other ranks.
    """
    if mesh.size() == 1:
        return
    platform = get_platform()
    content = b"".join(np.ascontiguousarray(a).tobytes() for a in batch if a is not None)
    own = np.array([zlib.crc32(content), *batch.tokens.shape], np.int64)
    seen = platform.from_numpy(own)
    for dim in ("tp", "dp"):
        seen = platform.all_gather(seen, mesh.get_group(dim))
    table = platform.to_numpy(seen).reshape(mesh.size("dp"), mesh.size("tp"), -1)
    for dp_rank, row in enumerate(table):
        checksums = row[:, 0].tolist()
        if len(set(checksums)) > 1:
            raise ValueError(
                f"the {len(checksums)} ranks of a tensor-parallel group must read the same batch, but those of "
                f"data-parallel rank {dp_rank} have batches with the checksums {checksums}"
            )
    shapes = sorted({tuple(shape) for shape in table[:, :, 1:].reshape(-1, table.shape[2] - 1).tolist()})
    if len(shapes) > 1:
        raise ValueError(f"data-parallel ranks have batches of different shapes: {shapes}; expected the same on all")
