"""Plans for models that bring none: from what transformers says of its own models, and for a few that it
says nothing of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.tensor_parallel.patterns import names_anything
from hyper_parallel.tensor_parallel.sequence_plan import over_the_sequence
from hyper_parallel.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = ["auto_plan", "base_prefixes", "head_name", "last_layer"]

Plan = Mapping[str, "str | ParallelStyle"]

_LLAMA: Plan = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_GPT2: Plan = {
    "wte": "embedding_rowwise",
    "h.*.attn.c_attn": "colwise",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
_PHI3: Plan = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.qkv_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "packed_colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_BY_TYPE: Mapping[str, Plan] = {"gpt2": _GPT2, "phi3": _PHI3}
"""By a config's ``model_type``. Phi3's own plan gathers the fused projections and computes all heads on
every rank.
"""


def auto_plan(
    model: Module,
    config: ParallelismConfig,
    *,
    sequence_parallel: bool = False,
    head: str | ParallelStyle | None = None,
) -> dict[str, str | ParallelStyle]:
    """A plan for all of ``model``, its last layer included.

    From the first that exists: a plan of this library for the model's type; the model's own (``tp_plan``,
    as models of transformers have it); that of Llama, where all its names are found. The last layer is
    class-sharded for ``loss_parallel()``, or treated as ``head`` says (``"linear_loss"``), unless
    ``config.disable_loss_parallel``. With
    ``sequence_parallel`` the activations between the shared layers are sharded over the sequence.

    Raises:
        ParallelPlanError: none of these; ``head`` for a model without a last layer.
    """
    backend = get_module_backend()
    names = [name for name, _ in backend.named_modules(model)]
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    own = _own_plan(model)
    if model_type in _BY_TYPE:
        plan = dict(_BY_TYPE[model_type])
    elif own:
        plan = _that_meet_something(own, model, names)
    elif all(names_anything(pattern, names, base_prefixes(model)) for pattern in _LLAMA):
        plan = dict(_LLAMA)
    else:
        raise ParallelPlanError(
            f"no plan is known for {backend.describe(model).type_name} (model_type {model_type!r}): it has no tp_plan, "
            f"and its modules are not named as Llama's are; types with a plan: {sorted(_BY_TYPE)}. Pass one, as a "
            "mapping of name patterns to styles"
        )
    name = head_name(model)
    if name is not None:
        plan.pop(name, None)
        plan[name] = last_layer(config) if head is None or config.disable_loss_parallel else head
    elif head is not None:
        raise ParallelPlanError(f"head={head!r}: {backend.describe(model).type_name} has no last layer that is known")
    embedding = _embedding_name(model)
    if embedding is not None and not any(names_anything(p, [embedding], base_prefixes(model)) for p in plan):
        plan = {embedding: RowwiseParallel(input_layouts=Replicate()), **plan}
    return over_the_sequence(model, plan, base_prefixes(model)) if sequence_parallel else plan


def last_layer(config: ParallelismConfig) -> ColwiseParallel:
    """How the last layer gives its logits: class-sharded DTensors, or, without loss parallel, whole plain
    ones.
    """
    if config.disable_loss_parallel:
        return ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


def base_prefixes(model: Module) -> list[str]:
    """Where the modules of a base model lie inside a model with a head."""
    named = getattr(model, "base_model_prefix", "")
    found = [named] if isinstance(named, str) and named else []
    names = [name for name, _ in get_module_backend().named_modules(model)]
    return found + [name for name in names if name and "." not in name and name not in found]


def _own_plan(model: Module) -> Plan:
    """What a transformers model says of itself: of all its modules, and (older releases) of its base
    model.
    """
    own = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    return {**{k: v for k, v in base.items() if not any(o == k or o.endswith(f".{k}") for o in own)}, **own}


def _that_meet_something(plan: Plan, model: Module, names: list[str]) -> dict[str, str | ParallelStyle]:
    """Such a plan is made for all variants of a model, which do not all have all modules."""
    backend = get_module_backend()
    parameters = [
        f"{name}.{p}" if name else p
        for name, module in backend.named_modules(model)
        for p in backend.own_parameters(module)
    ]
    prefixes = base_prefixes(model)
    return {k: v for k, v in plan.items() if names_anything(k, [*names, *parameters], prefixes)}


def head_name(model: Module) -> str | None:
    """The name of the last layer: what a transformers model says, else ``lm_head``; None when there is none."""
    names = [name for name, _ in get_module_backend().named_modules(model)]
    return _name_of(model, "get_output_embeddings") or ("lm_head" if "lm_head" in names else None)


def _embedding_name(model: Module) -> str | None:
    return _name_of(model, "get_input_embeddings")


def _name_of(model: Module, getter: str) -> str | None:
    """The name of the module that a transformers model's getter gives."""
    get: Any = getattr(model, getter, None)
    try:
        wanted = get() if callable(get) else None
    except (NotImplementedError, AttributeError):
        return None
    if wanted is None:
        return None
    backend = get_module_backend()
    kind = backend.describe(wanted).kind
    if kind not in ("linear", "embedding"):
        return None
    return next((name for name, module in backend.named_modules(model) if module is wanted), None)
