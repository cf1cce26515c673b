"""What plans refuse: on every rank, before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank


def refused(case: str) -> None:
    from hyper_parallel.core.placement_types import Partial, Replicate
    from hyper_parallel.platform.modules import get_module_backend
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    model: Any = adapter.module("Tiny", case == "parts", case == "tied")
    plan: Any = {"layers.*.mlp.up": "colwise"}
    if case == "misspelt":
        plan = {"layers.*.mlp.upp": "colwise"}
    elif case == "unknown kind":
        plan = {"head": "colwize"}
    elif case == "experts":
        plan = {"layers.*.mlp": "moe_tp_experts"}
    elif case == "not a layer":
        plan = {"layers.*.norm": "rowwise"}
    elif case == "own forward":
        model.extra = adapter.module("Scaled", 6, 11)
        plan = {"extra": "colwise"}
    elif case == "max_norm":
        model.extra = adapter.module("embedding", 11, 6, max_norm=1.0)
        plan = {"extra": "embedding_rowwise"}
    elif case == "parts":
        plan = {"layers.*.mlp.gate_up_proj": ColwiseParallel(parts=(3, 4))}
    elif case == "gathered parts":
        plan = {"head": ColwiseParallel(parts=(4, 7), use_local_output=False)}
    elif case == "heads":
        plan = {"head": ColwiseParallel(heads=11)}
    elif case == "partial":
        plan = {"head": ColwiseParallel(output_layouts=Partial())}
    elif case == "tied":
        plan = {"head": "colwise", "embed": "embedding_colwise"}
    elif case == "layouts":
        plan = {"head": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=())}
    elif case == "no plan known":
        plan = "auto"
    elif case == "no plan":
        plan = None
    elif case == "twice":
        parallelize_module(model, adapter.mesh, plan)
    elif case == "one rank":
        plan = {"headd": "colwise"} if this_rank() == 1 else plan
    elif case == "other models":
        model.extra = adapter.module("linear", 6, 11 + this_rank())
    elif case == "left out":
        plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    backend = get_module_backend()

    def state() -> Any:
        return [tuple(p.shape) for p in adapter.named_parameters(model).values()], [
            (type(m), backend.rules(m)) for _, m in backend.named_modules(model)
        ]

    before = state()
    try:
        parallelize_module(model, adapter.mesh, plan)
    finally:
        assert state() == before


REFUSED = {
    "misspelt": ("names no module", "near matches: layers.*.mlp.up", "layers.*.mlp.down"),
    "unknown kind": ("'colwize'", "'colwise_gather_output'"),
    "experts": ("'moe_tp_experts' is not supported", "mixture-of-experts"),
    "not a layer": ("RowwiseParallel cannot treat layers.0.norm", "LayerNorm"),
    "own forward": ("ColwiseParallel cannot treat extra", "Scaled"),
    "max_norm": ("extra", "max_norm=1.0"),
    "parts": ("(3, 4) add up to 7", "20"),
    "gathered parts": ("head", "use_local_output=True"),
    "heads": ("11 heads", "2 tensor-parallel ranks"),
    "partial": ("Shard(dim) or Replicate()", "Partial"),
    "tied": ("one parameter under several names", "embed.weight: dim 1", "head.weight: dim 0"),
    "layouts": ("head", "1 layouts", "0"),
    "no plan known": ("no plan is known for Tiny", "gpt2"),
    "no plan": ("expected 'auto'", "None"),
    "twice": ("layers.0.mlp.up.", "already shared"),
    "one rank": ("'headd' names no module",),
    "other models": ("ranks 0 and 1 have different models", "(11, 6)", "(12, 6)"),
    "left out": ("layers.0.mlp.gate has parameters", "among features that are sharded", "give it a rule"),
}


@pytest.mark.contract("T4")
@on_groups(2)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(platform: str, world_size: int, case: str) -> None:
    """Also misspelt names, which are not passed over (torchtune#2379): with near matches, and what stays whole."""
    errors = run_distributed(refused, case, platform=platform, world_size=world_size, expect_error=True, timeout=60.0)
    texts = REFUSED[case]
    if case == "tied" and platform == "mindspore":
        texts = (texts[0], "embed.embedding_table: dim 1", texts[2])
    for error in errors:
        assert error.type == "ParallelPlanError", error
        for text in texts:
            assert text in error.message, error.message
    if case == "one rank":
        assert errors[0].message.startswith("rank 1: ")


def not_a_tensor() -> None:
    from hyper_parallel.core.placement_types import Replicate
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    style = PrepareModuleInput(input_layouts=(Replicate(),) * 2, desired_input_layouts=(Replicate(),) * 2)
    model = parallelize_module(adapter.module("Outer"), adapter.mesh, style)
    model(adapter.tensor(np.ones((2, 6))), "kept", scale=1)


@on_groups(2)
def test_a_placement_for_what_is_no_tensor(platform: str, world_size: int) -> None:
    for error in run_distributed(not_a_tensor, platform=platform, world_size=world_size, expect_error=True):
        assert error.type == "TypeError" and "for a str" in error.message


def not_a_module() -> None:
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    parallelize_module([1], this_adapter().mesh, {})  # type: ignore[arg-type]


@on_groups(2)
def test_not_a_module(platform: str, world_size: int) -> None:
    for error in run_distributed(not_a_module, platform=platform, world_size=world_size, expect_error=True):
        assert error.type == "TypeError" and "found list" in error.message
