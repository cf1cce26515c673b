"""From a whole tensor in a file to what a rank holds of it: loaders, and a registry of the kinds of layers.

A loader says how a tensor is cut and reads only that. A factory chooses the loader for one parameter of a
layer; it is registered under the layer's kind, in whatever file defines it, and nothing else changes::

    @register_loader("column_fp8")
    def column_fp8(rule: ParallelRule, suffix: str) -> ShardLoader:
        return DimShardLoader(0)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.cuts import cut_parts

__all__ = [
    "DimShardLoader",
    "FusedShardLoader",
    "HeadShardLoader",
    "ParallelRule",
    "ReplicateLoader",
    "ShardLoader",
    "SpecLoader",
    "loader_kinds",
    "make_loader",
    "register_loader",
    "rule_spec",
]


@runtime_checkable
class ShardLoader(Protocol):
    """Anything that can read a rank's part of a tensor."""

    def load(self, handle: Any, rank: int, world_size: int) -> Tensor:
        """What ``rank`` of ``world_size`` holds.

        Args:
            handle: has ``get_shape()`` and slices like ``safetensors``' ``get_slice()``.
            rank: index in the tensor-parallel group.
            world_size: its size.
        """


class SpecLoader(ABC):
    """A loader that is one :class:`ShardSpec`: reads its slices and nothing else."""

    @abstractmethod
    def spec(self, shape: Sequence[int], ranks: int) -> ShardSpec:
        """How a tensor of ``shape`` is cut over ``ranks`` ranks.

        Raises:
            ParallelPlanError: it cannot be.
        """

    def load(self, handle: Any, rank: int, world_size: int) -> Tensor:
        """This rank's part, a contiguous copy of its own (a tensor, or an array where the handle gives
        arrays).

        Raises:
            ParallelPlanError: a rank outside the group, a tensor that cannot be cut so, or a handle that
                gives other shapes than it announced.
        """
        if not 0 <= rank < world_size:
            raise ParallelPlanError(f"rank {rank} is outside a group of {world_size}")
        shape = tuple(int(s) for s in handle.get_shape())
        spec = self.spec(shape, world_size)
        pieces = [_read(handle, shape, index) for index in spec.slices(rank)]
        out = _join(pieces, spec.dim or 0)
        if tuple(out.shape) != spec.local_shape(rank):
            raise ParallelPlanError(
                f"read a tensor of shape {tuple(out.shape)}, expected {spec.local_shape(rank)} "
                f"of the whole {shape}"
            )
        return out


@dataclass(frozen=True)
class ReplicateLoader(SpecLoader):
    """Every rank holds the whole tensor."""

    def spec(self, shape: Sequence[int], ranks: int) -> ShardSpec:
        """Not cut."""
        return ShardSpec.replicated(tuple(shape), ranks)


@dataclass(frozen=True)
class DimShardLoader(SpecLoader):
    """One dim is cut in ``torch.chunk`` sizes; trailing ranks may hold less, or nothing.

    Example:
        >>> DimShardLoader(0).spec((5, 3), 2).local_shape(1)
        (2, 3)
    """

    dim: int

    def spec(self, shape: Sequence[int], ranks: int) -> ShardSpec:
        """Chunks of ``dim``."""
        _check_dim(shape, self.dim)
        return ShardSpec.chunk(tuple(shape), self.dim, ranks)


@dataclass(frozen=True)
class FusedShardLoader(SpecLoader):
    """One dim is made of parts, each cut on its own: fused q/k/v or gate/up weights.

    Attributes:
        dim: the dim.
        parts: sizes of the parts.
        heads: for each part the number of its heads, which stay whole; None: cut anywhere.
    """

    dim: int
    parts: tuple[int, ...]
    heads: tuple[int | None, ...] | None = None

    def spec(self, shape: Sequence[int], ranks: int) -> ShardSpec:
        """Each part on its own."""
        _check_dim(shape, self.dim)
        return cut_parts(shape, self.dim, self.parts, self.heads or (None,) * len(self.parts), ranks)


@dataclass(frozen=True)
class HeadShardLoader(SpecLoader):
    """One dim is made of heads, which stay whole; heads that are fewer than the ranks are held by several
    of them.
    """

    dim: int
    heads: int

    def spec(self, shape: Sequence[int], ranks: int) -> ShardSpec:
        """Whole heads."""
        _check_dim(shape, self.dim)
        return cut_parts(shape, self.dim, (shape[self.dim],), (self.heads,), ranks)


@dataclass(frozen=True)
class ParallelRule:
    """What a plan says of one layer.

    Attributes:
        kind: the registered kind.
        parts: sizes of the fused parts of the output features, if there are several.
        heads: number of heads of each part (of the output features); empty: no heads.
        transposed: whether the weight is stored as ``[in, out]`` (GPT-2) and not as ``[out, in]``.
    """

    kind: str
    parts: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    transposed: bool = False


LoaderFactory = Callable[[ParallelRule, str], ShardLoader]
_registry: dict[str, LoaderFactory] = {}


def register_loader(kind: str) -> Callable[[LoaderFactory], LoaderFactory]:
    """Decorator: register a factory ``(rule, suffix) -> loader`` under ``kind``; suffix is ``".weight"`` or
    ``".bias"``.

    Raises:
        ParallelPlanError: the kind exists; the message lists all.
    """

    def decorate(factory: LoaderFactory) -> LoaderFactory:
        if kind in _registry:
            raise ParallelPlanError(
                f"loader kind {kind!r} is already registered; registered kinds: {loader_kinds()}"
            )
        _registry[kind] = factory
        return factory

    return decorate


def loader_kinds() -> tuple[str, ...]:
    """The registered kinds."""
    return tuple(sorted(_registry))


def make_loader(rule: ParallelRule, suffix: str) -> ShardLoader:
    """The loader for one parameter of a layer.

    Raises:
        ParallelPlanError: an unknown kind; the message lists those that exist.

    Example:
        >>> make_loader(ParallelRule("row"), ".bias")
        ReplicateLoader()
    """
    factory = _registry.get(rule.kind)
    if factory is None:
        raise ParallelPlanError(f"no loader of kind {rule.kind!r}; registered kinds: {loader_kinds()}")
    return factory(rule, suffix)


def rule_spec(rule: ParallelRule, suffix: str, shape: Sequence[int], ranks: int) -> ShardSpec:
    """How the rule's loader cuts a parameter of ``shape``; layers and plans cut as the loader reads.

    Raises:
        ParallelPlanError: the loader of the kind is no SpecLoader, so that nobody knows how it cuts.
    """
    loader = make_loader(rule, suffix)
    if not isinstance(loader, SpecLoader):
        raise ParallelPlanError(f"kind {rule.kind!r} gives a {type(loader).__name__}; expected a SpecLoader")
    return loader.spec(shape, ranks)


@register_loader("column")
def _column(rule: ParallelRule, suffix: str) -> ShardLoader:
    return DimShardLoader(_output_dim(rule, suffix))


@register_loader("fused_column")
def _fused_column(rule: ParallelRule, suffix: str) -> ShardLoader:
    return FusedShardLoader(_output_dim(rule, suffix), rule.parts, rule.heads or None)


@register_loader("head_column")
def _head_column(rule: ParallelRule, suffix: str) -> ShardLoader:
    if len(rule.heads) != 1:
        raise ParallelPlanError(f"kind 'head_column' takes one number of heads, found {rule.heads}")
    return HeadShardLoader(_output_dim(rule, suffix), rule.heads[0])


@register_loader("row")
def _row(rule: ParallelRule, suffix: str) -> ShardLoader:
    if suffix == ".bias":  # added once, after the sum over the ranks
        return ReplicateLoader()
    return DimShardLoader(0 if rule.transposed else 1)


@register_loader("vocab_embed")
def _vocab_embed(rule: ParallelRule, suffix: str) -> ShardLoader:
    return DimShardLoader(0)


@register_loader("column_embed")
def _column_embed(rule: ParallelRule, suffix: str) -> ShardLoader:
    return DimShardLoader(1)


@register_loader("replicate")
def _replicate(rule: ParallelRule, suffix: str) -> ShardLoader:
    return ReplicateLoader()


def _output_dim(rule: ParallelRule, suffix: str) -> int:
    return 1 if rule.transposed and suffix != ".bias" else 0


def _check_dim(shape: Sequence[int], dim: int) -> None:
    if not -len(shape) <= dim < len(shape):
        raise ParallelPlanError(f"cannot cut dim {dim} of a tensor of shape {tuple(shape)}")


def _read(handle: Any, shape: tuple[int, ...], index: tuple[slice, ...]) -> Any:
    bounds = [s.indices(size)[:2] for s, size in zip(index, shape)]
    if not shape or 0 in shape:
        piece = handle[...]
        return piece[tuple(slice(*b) for b in bounds)] if shape else piece
    # handles clamp or refuse empty slices: read one element there and take none of it
    read = tuple(slice(a, b) if a < b else slice(0, 1) for a, b in bounds)
    piece = handle[read]
    return piece[tuple(slice(0, b - a) for a, b in bounds)]


def _join(pieces: Sequence[Any], dim: int) -> Any:
    """One contiguous copy; a slice of a file would keep the whole file mapped."""
    if isinstance(pieces[0], (np.ndarray, np.generic)):
        return np.concatenate(pieces, dim) if pieces[0].ndim else np.array(pieces[0])
    platform = get_platform()
    return platform.cat(pieces, dim) if len(pieces[0].shape) else platform.copy_leaf(pieces[0])
