"""Parameters that the framework has sharded once more, over data-parallel ranks, as FSDP2 does."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.core.placement_types import Shard
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Parameter
from hyper_parallel.platform.platform import Tensor

__all__ = ["DataPiece", "data_piece", "held_rows", "local_part"]


@dataclass(frozen=True, eq=False)
class DataPiece:
    """What this rank holds of a tensor that data-parallel ranks share.

    Attributes:
        group: these ranks.
        dim: what they cut.
        start: its first index along it.
        stop: behind the last.
    """

    group: Group
    dim: int
    start: int
    stop: int


def data_piece(parameter: Parameter) -> DataPiece | None:
    """Where the framework has put this rank's part; None for an ordinary tensor.

    Raises:
        ValueError: a distributed tensor of the framework that is not sharded on one dim of a 1-D mesh.
    """
    if not get_platform().is_native_dtensor(parameter):
        return None
    from hyper_parallel.core.native import from_native  # loads the framework, which who reads files alone does not need

    layout = from_native(parameter).global_layout
    placement = layout.placements[0]
    if layout.mesh.ndim != 1 or not isinstance(placement, Shard):
        raise ValueError(
            f"a parameter is a distributed tensor of the framework, {layout.describe()}; expected a plain one, or one "
            "that FSDP2 has sharded over the data-parallel ranks"
        )
    group = layout.mesh.get_group()
    start, stop = chunk_ranges(layout.shape[placement.dim], group.size)[group.rank]
    return DataPiece(group, placement.dim, start, stop)


def held_rows(parameter: Parameter, dim: int) -> tuple[int, int] | None:
    """The range along ``dim`` that this rank holds of what tensor parallelism gave it; None: all of it."""
    piece = data_piece(parameter)
    return None if piece is None or piece.dim != dim else (piece.start, piece.stop)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor of the framework, in the same memory; other tensors as they are."""
    platform = get_platform()
    return platform.take_native_dtensor(tensor).local if platform.is_native_dtensor(tensor) else tensor
