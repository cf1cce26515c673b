"""Layers that a plan leaves whole, beside ones that give a rank its part of their features: what are they given?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform.modules import LayerFacts, Module, get_module_backend
from hyper_parallel.tensor_parallel.between import keeps_shards
from hyper_parallel.tensor_parallel.rules import Rule
from hyper_parallel.tensor_parallel.styles import ParallelStyle
from hyper_parallel.tensor_parallel.widths import ensure_whole_features

__all__ = ["WidthRule", "rules_for_neighbours", "watch"]

Chosen = Mapping[str, tuple[str, ParallelStyle]]


@dataclass(frozen=True, eq=False, kw_only=True)
class WidthRule(Rule):
    """The layer as it is, once its input is known to have all its features; no collective.

    Attributes:
        features: their number.
        producers: the layers beside it that give a rank its part of theirs.
    """

    features: int
    producers: str

    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and (shape := getattr(args[0], "shape", None)):
            ensure_whole_features(tuple(shape), self.features, self.where, self.producers)
        return forward(*args, **kwargs)


def rules_for_neighbours(facts: Mapping[str, LayerFacts], chosen: Chosen, mesh: DeviceMesh) -> dict[str, WidthRule]:
    """Rules for linear layers that the plan leaves whole and that lie near one whose output stays on its ranks: below
    the module two levels above it, such as a decoder layer; beside it, where it is a child of the model itself.
    """
    if mesh.size() == 1:
        return {}
    near: dict[str, list[str]] = {}
    for name, (_, style) in chosen.items():
        if facts[name].kind == "linear" and keeps_shards(style):
            near.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    rules = {}
    for name, found in facts.items():
        if found.kind != "linear" or name in chosen or not name:
            continue
        producers = [p for above in _ancestors(name) for p in near.get(above, ()) if "." in p or "." not in name]
        if producers:
            rules[name] = WidthRule(mesh=mesh, where=name, features=found.in_features, producers=_list(producers))
    return rules


def watch(module: Module, rule: WidthRule) -> None:
    """Add the rule to its module; one that can take no more rules does without."""
    with suppress(ValueError):
        get_module_backend().add_rule(module, rule)


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _list(names: list[str]) -> str:
    shown = list(dict.fromkeys(names))
    return " and ".join(shown) if len(shown) < 3 else f"{shown[0]} (as others)"
