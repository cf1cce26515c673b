"""Initial weights that do not depend on the number of ranks.

A parameter is divided into tiles of a fixed size. Each tile has a random stream of its own, keyed by the
seed, the parameter's name and the tile's position in the whole tensor (Philox, a counter-based generator:
Salmon et al., SC 2011). A rank draws the tiles it needs and keeps what it owns, so any cut of a parameter
gives the same whole tensor, no rank ever holds more than its part plus a tile, and every backend starts from
the same numbers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "draw_shard"]

_TILE = 128
_VECTOR_TILE = _TILE * _TILE


class Initializer(Protocol):
    """How the values of a parameter are distributed; never depends on how the parameter is cut."""

    def fill(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """float32 values of one tile."""


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def fill(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """The value, whatever the generator."""
        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True)
class Normal:
    """Normally distributed with mean 0 and standard deviation ``std``."""

    std: float

    def fill(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw them."""
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(self.std)


@dataclass(frozen=True)
class Uniform:
    """Uniform in ``[-bound, bound)``."""

    bound: float

    def fill(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw them."""
        return (generator.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)) * np.float32(
            self.bound
        )


def draw_shard(name: str, spec: ShardSpec, rank: int, initializer: Initializer, seed: int) -> np.ndarray:
    """The initial values of what ``rank`` holds of a parameter.

    Args:
        name: the parameter's name in the unsharded model; part of the key.
        spec: how it is cut.
        rank: index in the group that it is cut over.
        initializer: the distribution.
        seed: the job's seed, 0 or more.

    Returns:
        A float32 array of shape ``spec.local_shape(rank)``. No collective.

    Example:
        >>> whole = draw_shard("w", ShardSpec.replicated((259, 8), 1), 0, Normal(0.02), seed=0)
        >>> half = draw_shard("w", ShardSpec.chunk((259, 8), 0, 2), 1, Normal(0.02), seed=0)
        >>> bool((whole[130:] == half).all())
        True
    """
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, found {seed}")
    out = np.empty(spec.local_shape(rank), np.float32)
    offset = 0
    for index in spec.slices(rank):
        bounds = [s.indices(size)[:2] for s, size in zip(index, spec.shape)]
        if spec.dim is None:
            _fill_box(out, name, spec.shape, bounds, initializer, seed)
        else:
            length = bounds[spec.dim][1] - bounds[spec.dim][0]
            part = out[(slice(None),) * spec.dim + (slice(offset, offset + length),)]
            _fill_box(part, name, spec.shape, bounds, initializer, seed)
            offset += length
    return out


def _fill_box(
    out: np.ndarray,
    name: str,
    shape: tuple[int, ...],
    bounds: Sequence[tuple[int, int]],
    initializer: Initializer,
    seed: int,
) -> None:
    """Fill ``out`` with the box ``bounds`` of the whole tensor."""
    if out.size == 0:
        return
    tile = _tile_shape(shape)
    grid = [-(-size // edge) for size, edge in zip(shape, tile)]
    key = _key(seed, name)
    touched = [range(lo // edge, -(-hi // edge)) for (lo, hi), edge in zip(bounds, tile)]
    for position in itertools.product(*touched):
        start = [p * edge for p, edge in zip(position, tile)]
        stop = [min(s + edge, size) for s, edge, size in zip(start, tile, shape)]
        # The tile's number sits in the upper half of the counter, so that streams of two tiles never meet.
        number = int(np.ravel_multi_index(position, grid)) if grid else 0
        generator = np.random.Generator(np.random.Philox(key=key, counter=number << 128))
        values = initializer.fill(generator, tuple(b - a for a, b in zip(start, stop)))
        kept = [(max(a, lo), min(b, hi)) for a, b, (lo, hi) in zip(start, stop, bounds)]
        source = tuple(slice(a - s, b - s) for (a, b), s in zip(kept, start))
        target = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(kept, bounds))
        out[target] = values[source]


def _tile_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Tiles are cut over the last two dims; every index of the dims before has tiles of its own."""
    if len(shape) < 2:
        return (_VECTOR_TILE,) * len(shape)
    return (1,) * (len(shape) - 2) + (_TILE, _TILE)


def _key(seed: int, name: str) -> int:
    """128 bits from the seed and the parameter's name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:16], "little")
