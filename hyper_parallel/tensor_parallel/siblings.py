"""Layers side by side that a block's code works on together: gate and up, query, key and value, and what takes their
result. Whether a plan gives each the kind of features that the others have is seen before anything is changed.

The names are those of transformers' models and of Meta's Llama. What a block with other names does is not known; there
a layer that is given another width than its own says so (:mod:`.widths`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform.modules import LayerFacts
from hyper_parallel.tensor_parallel.attention import PROJECTIONS
from hyper_parallel.tensor_parallel.between import keeps_shards
from hyper_parallel.tensor_parallel.prepare import NoParallel
from hyper_parallel.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, placement_of

__all__ = ["check_siblings"]

Chosen = Mapping[str, tuple[str, ParallelStyle]]

_FEATURES = (Shard(-1), Shard(2))


@dataclass(frozen=True)
class _Family:
    """Names of layers whose outputs are combined, and of those that take the result."""

    producers: frozenset[str]
    consumers: frozenset[str]
    alike: bool = True
    """Whether all have the same widths, and put out what the consumer takes: not so where outputs are fused."""


def _family(producers: str, consumers: str) -> _Family:
    return _Family(frozenset(producers.split()), frozenset(consumers.split()))


_FAMILIES = (
    _family("gate_proj up_proj", "down_proj"),
    _family("gate up", "down"),
    _family("w1 w3", "w2"),
    _family("wi_0 wi_1", "wo"),
    _family("wi", "wo"),
    _family("fc1", "fc2"),
    _family("c_fc", "c_proj"),
    _family("fc_in", "fc_out"),
    _family("lin1", "lin2"),
    _family("dense_h_to_4h", "dense_4h_to_h"),
    _Family(frozenset({"gate_up_proj"}), frozenset({"down_proj", "down"}), alike=False),
    _Family(PROJECTIONS, frozenset({"o_proj", "out_proj", "wo", "dense", "c_proj", "o", "out_lin"}), alike=False),
)


def check_siblings(facts: Mapping[str, LayerFacts], chosen: Chosen) -> None:
    """Refuse a plan that shares some of the layers that belong together.

    Args:
        facts: of all modules by name.
        chosen: the modules that the plan names, with pattern and style.

    Raises:
        ParallelPlanError: layers whose outputs are combined, of which some give a rank its part of the features and
            some all; a layer that takes such parts and is whole; one that expects parts and is given all.
    """
    for block in {name.rpartition(".")[0]: None for name in chosen}:
        for family in _FAMILIES:
            _check(block, family, facts, chosen)


def _check(block: str, family: _Family, facts: Mapping[str, LayerFacts], chosen: Chosen) -> None:
    producers = dict(_linear(block, family.producers, facts))
    if not producers or (family.alike and len({(f.in_features, f.out_features) for f in producers.values()}) > 1):
        return
    gives = {name: _gives(chosen.get(name)) for name in producers}
    if None in gives.values():
        return
    parts = [name for name, given in gives.items() if given == "part"]
    others = [name for name in producers if name not in parts]
    if parts and others:
        raise ParallelPlanError(
            f"{_names(parts)} ({_style(parts[0], chosen)}) give a rank its part of the features, {_names(others)} "
            f"({_style(others[0], chosen)}) all of them, and {block or 'the model'} works on them together; expected "
            "the same style for all of them, or 'colwise_gather_output' where parts are not wanted"
        )
    widths = {f.out_features for f in producers.values()}
    for name, consumer in _linear(block, family.consumers, facts):
        if family.alike and consumer.in_features not in widths:
            continue
        if not block and name not in chosen:  # a block by itself may be finished by hand; the layer watches its input
            continue
        takes = _takes(chosen.get(name))
        if takes == "all" and parts:
            raise ParallelPlanError(
                f"{_names(parts)} ({_style(parts[0], chosen)}) give a rank its part of the features, and {name} "
                f"({_style(name, chosen)}) takes all of them; expected 'rowwise' for it, or 'colwise_gather_output' "
                "for those"
            )
        if takes == "part" and all(given == "all" for given in gives.values()):
            raise ParallelPlanError(
                f"{name} ({_style(name, chosen)}) takes a rank's part of the features, and {_names(others)} "
                f"({_style(others[0], chosen)}) give all of them; expected 'colwise' for these, or "
                "'rowwise_split_input' for that one"
            )


def _linear(block: str, children: frozenset[str], facts: Mapping[str, LayerFacts]) -> Iterator[tuple[str, LayerFacts]]:
    for child in sorted(children):
        name = f"{block}.{child}" if block else child
        if name in facts and facts[name].kind == "linear":
            yield name, facts[name]


def _gives(entry: tuple[str, ParallelStyle] | None) -> str | None:
    """What a layer's output is on a rank: ``"all"``, its ``"part"``, a ``"dtensor"`` that knows; None: not known."""
    style = None if entry is None else entry[1]
    if style is None or (isinstance(style, NoParallel) and style.use_local_output and not style.output_layout):
        return "all"
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return None
    if keeps_shards(style):
        return "part"
    output = placement_of(style.output_layouts, Shard(-1) if isinstance(style, ColwiseParallel) else Replicate())
    if not style.use_local_output:
        return "dtensor"
    return "all" if isinstance(output, Replicate) else None


def _takes(entry: tuple[str, ParallelStyle] | None) -> str | None:
    """What a layer takes a plain input for."""
    style = None if entry is None else entry[1]
    if style is None or isinstance(style, NoParallel):
        return "all"
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return None
    given = placement_of(style.input_layouts, Shard(-1) if isinstance(style, RowwiseParallel) else Replicate())
    if given in _FEATURES:
        return "part"
    return "all" if isinstance(given, Replicate) else None


def _names(names: list[str]) -> str:
    return " and ".join(names)


def _style(name: str, chosen: Chosen) -> str:
    return chosen[name][1].describe() if name in chosen else "not in the plan"
