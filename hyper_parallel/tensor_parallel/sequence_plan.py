"""A plan whose activations between the shared layers are sharded over the sequence (arXiv 2205.05198)."""

from __future__ import annotations

from collections.abc import Mapping

from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.tensor_parallel.kinds import style_of
from hyper_parallel.tensor_parallel.patterns import generic, match_patterns
from hyper_parallel.tensor_parallel.prepare import PrepareModuleOutput, SequenceParallel
from hyper_parallel.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = ["over_the_sequence"]

_SEQUENCE = Shard(1)


def over_the_sequence(
    model: Module, plan: Mapping[str, str | ParallelStyle], prefixes: list[str]
) -> dict[str, str | ParallelStyle]:
    """The same sharing with a sequence-parallel residual stream, in DTensors S(1) of ``[batch, sequence,
    features]``.

    Row-parallel layers and embeddings give S(1), by a reduce-scatter in the place of the all-reduce;
    column-parallel layers gather it; norms work on it, their parameters' gradients are summed. DTensors
    know their whole shape, so the model's code sees the length of the whole sequence, and that need not be
    divisible.
    """
    backend = get_module_backend()
    modules = dict(backend.named_modules(model))
    kinds = {name: backend.describe(module).kind for name, module in modules.items()}
    matched = match_patterns(list(plan), list(modules), prefixes, [], [])
    changed: dict[str, str | ParallelStyle] = {}
    for pattern, kind in plan.items():
        style = style_of(kind, pattern)
        if isinstance(style, RowwiseParallel):
            changed[pattern] = RowwiseParallel(
                input_layouts=style.input_layouts, output_layouts=_SEQUENCE, use_local_output=False
            )
        else:
            changed[pattern] = kind
    ruled = {name for names in matched.values() for name in names}
    shared = {
        name.rpartition(".")[0]
        for name in ruled
        if isinstance(style_of(plan[_pattern_of(name, matched)], name), ColwiseParallel)
    } - {""}
    for name, module in modules.items():
        if name in ruled or any(name.startswith(f"{block}.") for block in shared):
            continue
        if kinds[name] == "embedding":  # of positions
            changed[generic(name)] = PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=_SEQUENCE, use_local_output=False
            )
        elif kinds[name] == "other" and backend.own_parameters(module):
            changed[generic(name)] = SequenceParallel()
    return changed


def _pattern_of(name: str, matched: Mapping[str, tuple[str, ...]]) -> str:
    return next(pattern for pattern, names in matched.items() if name in names)
