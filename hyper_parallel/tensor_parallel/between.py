"""Parameters that lie among sharded features and that no rule names: each rank would get a part of their gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hyper_parallel.core.placement_types import Shard
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import LayerFacts, Module, get_module_backend
from hyper_parallel.tensor_parallel.attention import Attention
from hyper_parallel.tensor_parallel.prepare import SummedGradients
from hyper_parallel.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, placement_of

__all__ = ["keeps_shards", "rules_between"]

Chosen = Mapping[str, tuple[str, ParallelStyle]]


def keeps_shards(style: ParallelStyle) -> bool:
    """Whether it leaves a layer's output features on their ranks, as plain tensors."""
    return (
        isinstance(style, ColwiseParallel)
        and style.use_local_output
        and placement_of(style.output_layouts, Shard(-1)) in (Shard(-1), Shard(2))
    )


def rules_between(
    modules: Mapping[str, Module],
    facts: Mapping[str, LayerFacts],
    chosen: Chosen,
    attentions: Mapping[str, Attention],
    automatic: bool,
) -> dict[str, tuple[str, ParallelStyle]]:
    """Rules to add for such parameters: the sum of their gradients, where they are norms of heads or single numbers.

    Raises:
        ParallelPlanError: others; and all of them, unless the plan is ``automatic`` and none of the user's.
    """
    added: dict[str, tuple[str, ParallelStyle]] = {}
    for name, block, shapes in _unnamed(modules, facts, chosen, attentions):
        attention = attentions.get(block)
        known = {(width,) for width in attention.head_widths} if attention else set()
        if automatic and name != block and all(s in known or _is_number(s) for s in shapes.values()):
            added[name] = ("(added)", SummedGradients())
            continue
        raise ParallelPlanError(
            f"{name} has parameters {shapes} and lies in {block}, among features that are sharded; give it a rule: "
            "'replicated_with_grad_allreduce' where it works on them (such as a norm of each head), or 'replicate' "
            "where its input is whole"
        )
    return added


def _unnamed(
    modules: Mapping[str, Module],
    facts: Mapping[str, LayerFacts],
    chosen: Chosen,
    attentions: Mapping[str, Attention],
) -> Iterator[tuple[str, str, dict[str, tuple[int, ...]]]]:
    """Module, block, shapes of its parameters. In an MLP a norm of the whole hidden size may have the whole input."""
    backend, platform = get_module_backend(), get_platform()
    rows = {name.rpartition(".")[0] for name, (_, style) in chosen.items() if isinstance(style, RowwiseParallel)}
    blocks: dict[str, set[int]] = {}
    for name, (_, style) in chosen.items():
        block = name.rpartition(".")[0]
        if keeps_shards(style) and facts[name].kind == "linear" and block and (block in rows or block in attentions):
            blocks.setdefault(block, set()).add(facts[name].in_features)
    for block, widths in blocks.items():
        for name, module in modules.items():
            if name != block and not name.startswith(f"{block}."):
                continue
            if any(name == c or name.startswith(f"{c}.") for c in chosen):
                continue
            shapes = {own: platform.shape(p) for own, p in backend.own_parameters(module).items()}
            whole = block not in attentions and all(s in {(w,) for w in widths} for s in shapes.values())
            if shapes and not whole:
                yield name, block, shapes


def _is_number(shape: tuple[int, ...]) -> bool:
    return all(size == 1 for size in shape)
