"""Attention modules: whole heads on every rank, key and value heads shared where ranks outnumber them.

A plan names projections (``self_attn.q_proj``); that their outputs are made of heads, and how many, is read
from the model: the number of heads from the attention module or the nearest config above it, the roles from
the projections' names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform.modules import LayerFacts, Module

__all__ = ["PROJECTIONS", "Attention", "OutputParts", "find_attention", "fused_parts"]

_QUERY = frozenset({"q_proj", "query", "wq", "q_attn", "q", "to_q", "q_lin"})
_KEY_VALUE = frozenset({"k_proj", "v_proj", "key", "value", "wk", "wv", "k", "v", "to_k", "to_v", "k_lin", "v_lin"})
_FUSED = frozenset({"qkv_proj", "c_attn", "Wqkv", "qkv"})
"""Outputs are [queries; keys; values]."""
_INTERLEAVED = frozenset({"query_key_value"})
"""Outputs are a query, a key and a value for each head in turn."""
PROJECTIONS = _QUERY | _KEY_VALUE | _FUSED | _INTERLEAVED
"""Names of layers whose outputs an attention module works on together."""
_GATE_UP = frozenset({"gate_up_proj"})

_FOR_ALL_HEADS = frozenset({"alibi", "position_bias"})
"""Arguments of Bloom's attention, of MPT's and of T5's."""
_OTHER_FUSED = frozenset({"multi_query", "mp_num"})
"""Attributes of GPT-BigCode's attention, and of CodeGen's: both mix the heads of queries, keys and values."""

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUP_COUNTS = ("num_key_value_groups", "n_rep")
_CONFIG_QUERY = ("num_attention_heads", "n_head", "n_heads", "num_heads")


@dataclass(frozen=True)
class OutputParts:
    """What the output features of a projection are made of."""

    parts: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """An attention module whose heads the ranks share.

    Attributes:
        projections: child name -> the parts of its output.
        attributes: what the module's attributes must be on every rank, such as its number of heads.
    """

    projections: Mapping[str, OutputParts]
    attributes: Mapping[str, Any]

    @property
    def head_widths(self) -> frozenset[int]:
        """Widths of its heads."""
        return frozenset(part // heads for p in self.projections.values() for part, heads in zip(p.parts, p.heads))


class LocalHeadsConfig:
    """A model's config as an attention module sees it that holds a part of the heads; everything else
    passes through.
    """

    def __init__(self, config: Any, changes: Mapping[str, int]) -> None:
        self.__dict__["_whole"] = config
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_whole"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_whole"], name, value)


def find_attention(
    name: str, module: Module, column_children: Mapping[str, LayerFacts], config: Any, ranks: int
) -> Attention | None:
    """What an attention module becomes when the projections in ``column_children`` are shared; None: it is
    none.

    Args:
        name: the module's name, for messages.
        module: the parent of the projections.
        column_children: those whose output features are shared, with what they are.
        config: the nearest config above, or None.
        ranks: number of ranks.

    Raises:
        ParallelPlanError: the heads do not fit the ranks; the message names both numbers.
    """
    roles = {child: role for child in column_children if (role := _role(child)) is not None}
    if not set(roles.values()) & {"query", "fused", "interleaved"}:
        return None
    if ranks > 1:
        _refuse_other_layouts(name, module, set(roles.values()))
    queries, key_values = _head_counts(name, module, config)
    if queries % ranks:
        raise ParallelPlanError(
            f"{name}: {queries} attention heads cannot be shared by {ranks} tensor-parallel ranks; expected a number "
            f"of heads that is a multiple of {ranks}"
        )
    if key_values % ranks and ranks % key_values:
        raise ParallelPlanError(
            f"{name}: {key_values} key/value heads cannot be laid over {ranks} tensor-parallel ranks; expected one to "
            "be a multiple of the other"
        )
    if "interleaved" in roles.values() and key_values != queries and key_values % ranks:
        raise ParallelPlanError(
            f"{name}: {key_values} key/value heads inside one projection cannot be shared by {ranks} tensor-parallel "
            f"ranks; expected a multiple of {ranks}"
        )
    known = _first_integer(module, ("head_dim", "head_size"))
    projections = {
        child: _parts(f"{name}.{child}", role, column_children[child], queries, key_values, known)
        for child, role in roles.items()
    }
    has_fused = "fused" in roles.values()
    return Attention(projections, _attributes(module, queries, key_values, ranks, projections, has_fused))


def _refuse_other_layouts(name: str, module: Module, roles: set[str]) -> None:
    """Attention that a share of the heads would make compute something else, or fail in its middle.

    Raises:
        ParallelPlanError: what is made for all heads comes from outside; a fused projection is not laid out as its
            name says.
    """
    found = None
    forward = getattr(module, "forward", None) or getattr(module, "construct", None)
    taken = set(inspect.signature(forward).parameters) if callable(forward) else set()
    for argument in sorted(_FOR_ALL_HEADS & taken):
        found = f"its forward takes {argument!r}, which is made for all heads outside of it"
    for attribute in sorted(_OTHER_FUSED):
        if "fused" in roles and hasattr(module, attribute):
            found = f"its projection is not laid out as [queries; keys; values] (it has the attribute {attribute!r})"
    if found:
        raise ParallelPlanError(
            f"{name}: its heads cannot be shared between ranks: {found}; leave its projections out of the plan, which "
            "keeps them whole"
        )


def fused_parts(child: str, facts: LayerFacts) -> OutputParts | None:
    """The parts of a feed-forward projection that is known to be fused: [gate; up]."""
    if child in _GATE_UP and facts.out_features % 2 == 0:
        return OutputParts((facts.out_features // 2,) * 2, ())
    return None


def _role(child: str) -> str | None:
    for role, names in (
        ("query", _QUERY), ("key_value", _KEY_VALUE), ("fused", _FUSED), ("interleaved", _INTERLEAVED)
    ):  # fmt: skip
        if child in names:
            return role
    return None


def _head_counts(name: str, module: Module, config: Any) -> tuple[int, int]:
    queries = _first_integer(module, _QUERY_COUNTS) or _first_integer(config, _CONFIG_QUERY)
    if queries is None:
        raise ParallelPlanError(
            f"{name}: the number of attention heads is neither an attribute of the module ({_QUERY_COUNTS}) nor of a "
            f"config above it ({_CONFIG_QUERY}); give it in the plan, as ColwiseParallel(heads=...)"
        )
    key_values = _first_integer(module, _KEY_VALUE_COUNTS) or _first_integer(config, _KEY_VALUE_COUNTS)
    return queries, key_values or queries


def _first_integer(owner: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _parts(
    name: str, role: str, facts: LayerFacts, queries: int, key_values: int, head_width: int | None
) -> OutputParts:
    width = facts.out_features
    if role == "fused":
        # queries, keys and values; as many of each, whatever the config says (GPT-2); keys and values (cross-attention)
        candidates = [(queries, key_values, key_values), (queries,) * 3, (key_values,) * 2]
        for heads in candidates:
            each = width // sum(heads)
            if each * sum(heads) == width and head_width in (None, each):
                return OutputParts(tuple(each * h for h in heads), heads)
        raise ParallelPlanError(
            f"{name}: {width} output features are not made of {queries} query and {key_values} key/value heads"
        )
    count = key_values if role == "key_value" else queries
    if width % count:
        raise ParallelPlanError(f"{name}: {width} output features are not made of {count} equal heads")
    return OutputParts((width,), (count,))


def _attributes(
    module: Module,
    queries: int,
    key_values: int,
    ranks: int,
    projections: Mapping[str, OutputParts],
    has_fused: bool,
) -> dict[str, Any]:
    """Attributes that the module's code reads and that count heads: the local numbers in the place of the
    whole ones.
    """
    own_queries, own_key_values = queries // ranks, max(key_values // ranks, 1)
    values = {
        **dict.fromkeys(_QUERY_COUNTS, (queries, own_queries)),
        **dict.fromkeys(_KEY_VALUE_COUNTS, (key_values, own_key_values)),
        **dict.fromkeys(_GROUP_COUNTS, (queries // key_values, own_queries // own_key_values)),
    }
    if has_fused:  # how wide the queries are in what the code splits
        width = max(parts.parts[0] for parts in projections.values())
        values["split_size"] = (width, width // ranks)
    found: dict[str, Any] = {
        name: own for name, (whole, own) in values.items() if getattr(module, name, None) == whole and own != whole
    }
    config = getattr(module, "config", None)
    if has_fused and config is not None and ranks > 1:
        counts = {
            name: own
            for name, (whole, own) in values.items()
            if name in (*_QUERY_COUNTS, *_KEY_VALUE_COUNTS) and getattr(config, name, None) == whole
        }
        found["config"] = LocalHeadsConfig(config, counts)
    return found
