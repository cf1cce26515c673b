"""Plans that sum a module's gradients over the ranks although nothing in them cuts its activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hyper_parallel.core.placement_types import Shard
from hyper_parallel.tensor_parallel.prepare import SequenceParallel, SummedGradients
from hyper_parallel.tensor_parallel.styles import ColwiseParallel, ParallelStyle

__all__ = ["summed_without_parts"]


def summed_without_parts(chosen: Mapping[str, tuple[str, ParallelStyle]]) -> list[str]:
    """Names of modules whose gradients become too large, unless the model's own code cuts their input.

    A sequence has to be cut by another entry of the plan, heads by a column-parallel layer beside the norm. Where the
    plan is of one module alone (named ""), what that is given is not of the plan.

    Args:
        chosen: the modules that the plan names, with pattern and style.
    """
    sequence = any(
        isinstance(x, Shard) and x.dim not in (-1, 2)
        for _, style in chosen.values()
        if not isinstance(style, SequenceParallel)
        for value in vars(style).values()
        for x in _leaves(value)
    )
    heads = {name.rpartition(".")[0] for name, (_, style) in chosen.items() if isinstance(style, ColwiseParallel)}
    return [
        name
        for name, (_, style) in chosen.items()
        if (isinstance(style, SequenceParallel) and name and not sequence)
        or (isinstance(style, SummedGradients) and name and name.rpartition(".")[0] not in heads)
    ]


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, Mapping):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from _leaves(item)
    else:
        yield x
