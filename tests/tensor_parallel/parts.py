"""What each rank holds of an array, and the whole made of it. Free of frameworks: for workers and the parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec
from tests.harness import this_rank

__all__ = ["Differentiated", "Part", "own_part", "whole_of"]

Part = tuple[np.ndarray, "ShardSpec | None"]
"""A rank's part of something, and how the whole is cut."""


@dataclass(frozen=True)
class Differentiated:
    """What a function gave on a rank, its gradients, and the collectives of either pass by name and number."""

    value: np.ndarray
    inputs: list[np.ndarray | None]
    parameters: list[Part]
    forward: dict[str, int]
    backward: dict[str, int]


def own_part(whole: np.ndarray, spec: ShardSpec | None) -> np.ndarray:
    """What this rank holds."""
    if spec is None or spec.dim is None:
        return whole
    return np.concatenate([whole[index] for index in spec.slices(this_rank())], spec.dim)


def whole_of(parts: Sequence[Part], tolerance: float = 1e-12) -> np.ndarray:
    """The whole, from what every rank gave. Where several ranks hold the same, it must be equal."""
    array, spec = parts[0]
    if spec is None or spec.dim is None:
        for other, _ in parts[1:]:
            np.testing.assert_allclose(other, array, rtol=tolerance, atol=tolerance)
        return array
    whole = np.full(spec.shape, np.nan)
    for rank, (part, _) in enumerate(parts):
        start = 0
        for index in spec.slices(rank):
            length = whole[index].shape[spec.dim]
            piece = np.take(part, range(start, start + length), spec.dim)
            known = whole[index]
            np.testing.assert_allclose(piece[~np.isnan(known)], known[~np.isnan(known)], rtol=tolerance, atol=tolerance)
            whole[index] = piece
            start += length
        assert start == part.shape[spec.dim]
    assert not np.isnan(whole).any(), "nobody holds some elements"
    return whole
