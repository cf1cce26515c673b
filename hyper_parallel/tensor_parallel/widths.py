"""Whether a layer is given the features that its weight has. Where a plan leaves out a layer between others, or names
one too many, it is not: then the layer that finds out says where, and what the cause may be.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.placement_types import Placement, Shard
from hyper_parallel.tensor_parallel.activations import shape_of

__all__ = ["ensure_whole_features", "sharded_size"]


def ensure_whole_features(shape: tuple[int, ...], features: int, where: str, producers: str = "") -> None:
    """Whether an input of (global) ``shape`` has all ``features`` of a layer. No collective; ranks see the same.

    Args:
        shape: of the input.
        features: of the layer.
        where: the layer's name.
        producers: names of layers that give a rank its part of their features and may be what the input is made of.

    Raises:
        ValueError: it has another number of them.
    """
    if shape and shape[-1] != features:
        raise ValueError(
            f"{where}: the input has {shape[-1]} features (shape {shape}); expected all {features}, on every rank. "
            f"{producers or 'A layer before it'} may give each rank its part of them: then share this one with "
            "'rowwise', or have that one give all ('colwise_gather_output')"
        )


def sharded_size(
    x: Any, placement: Placement, features: int, where: str, sequence_length: int | None = None
) -> int | None:
    """The global size of the dim that a plain input of a column-parallel layer is sharded over, where it is known: of
    its features it is.

    Raises:
        ValueError: an input whose features are not those of the layer.
    """
    shape = shape_of(x)
    if not isinstance(x, DTensor) and placement in (Shard(-1), Shard(len(shape) - 1)):
        return features
    ensure_whole_features(shape, features, where)
    return sequence_length
