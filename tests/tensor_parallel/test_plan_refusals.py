"""What plans refuse: on every rank, before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank


def refused(case: str) -> None:
    from hyper_parallel.core.placement_types import Partial, Replicate, Shard
    from hyper_parallel.platform.modules import get_module_backend
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    model: Any = adapter.module("Tiny", case == "parts", case == "tied")
    plan: Any = {"head": "colwise"}
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
        plan = {"layers.*.mlp.gate_up_proj": ColwiseParallel(parts=(3, 4)), "layers.*.mlp.down": "rowwise"}
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
        model.layers[0].mlp.between = adapter.module("linear", 10, 10)
        plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.gate": "colwise", "layers.*.mlp.down": "rowwise"}
    elif case == "layout in a tuple":
        plan = {"layers.*.mlp.gate": ColwiseParallel(output_layouts=(Shard(-1),))}  # type: ignore[arg-type]
    elif case in INCOMPLETE:
        plan = INCOMPLETE[case]
        if "attn" in str(plan):
            model = adapter.module("AttentionModel", 4, 2, False)
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


INCOMPLETE: dict[str, Any] = {
    "gate alone": {"layers.*.mlp.gate": "colwise"},
    "up gathered": {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise_rep", "layers.*.mlp.down": "rowwise"},
    "up replicated": {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "replicate", "layers.*.mlp.down": "rowwise"},
    "down left out": {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise"},
    "down takes all": {"layers.*.mlp.*[ep]": "colwise", "layers.*.mlp.down": "rowwise_split_input"},
    "down alone": {"layers.*.mlp.down": "rowwise"},
    "key alone": {"attn.k_proj": "colwise"},
    "value replicated": {"attn.[qk]_proj": "colwise", "attn.v_proj": "replicate", "attn.o_proj": "rowwise"},
    "no output": {"attn.[qkv]_proj": "colwise"},
    "output alone": {"attn.o_proj": "rowwise"},
}
"""Some of the layers that a block works on together, without the others."""

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
    "twice": ("head.weight", "already shared"),
    "one rank": ("'headd' names no module",),
    "other models": ("ranks 0 and 1 have different models", "(11, 6)", "(12, 6)"),
    "left out": ("layers.0.mlp.between has parameters", "among features that are sharded", "give it a rule"),
    "gate alone": ("layers.0.mlp.gate (ColwiseParallel -> S(-1)) give", "layers.0.mlp.up (not in the plan) all"),
    "layout in a tuple": ("layers.0.mlp.gate (ColwiseParallel -> S(-1)) give", "layers.0.mlp.up (not in the plan) all"),
    "up gathered": ("layers.0.mlp.gate (ColwiseParallel -> S(-1)) give", "layers.0.mlp.up (ColwiseParallel -> R) all"),
    "up replicated": ("layers.0.mlp.gate (ColwiseParallel -> S(-1)) give", "layers.0.mlp.up (NoParallel"),
    "down left out": ("layers.0.mlp.gate and layers.0.mlp.up", "layers.0.mlp.down (not in the plan) takes all"),
    "down takes all": ("layers.0.mlp.down (RowwiseParallel R -> R) takes all", "expected 'rowwise' for it"),
    "down alone": ("layers.0.mlp.down (RowwiseParallel -> R) takes a rank's part", "layers.0.mlp.up (not in the plan)"),
    "key alone": ("attn.k_proj (ColwiseParallel -> S(-1)) give", "attn.q_proj and attn.v_proj (not in the plan) all"),
    "value replicated": ("attn.k_proj and attn.q_proj (", "attn.v_proj (NoParallel"),
    "no output": ("attn.k_proj and attn.q_proj and attn.v_proj (", "attn.o_proj (not in the plan) takes all"),
    "output alone": ("attn.o_proj (RowwiseParallel -> R) takes a rank's part", "expected 'colwise' for these"),
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


CHAINS: dict[str, dict[str, str]] = {
    "whole": {"block.first": "colwise"},
    "column": {"block.first": "colwise", "block.second": "colwise"},
    "row": {"block.second": "rowwise"},
    "row of all": {"block.first": "colwise", "block.second": "rowwise_split_input"},
    "linear loss": {"block.first": "colwise", "block.second": "linear_loss"},
}
"""Plans that are wrong in the middle, of layers whose names do not tell."""


def chained() -> dict[str, str]:
    """What the first forward raises, for each of them and for the library's own layers."""
    from hyper_parallel import ColumnParallelLinear, ColwiseParallel, RowParallelLinear, Shard
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    x = adapter.tensor(np.ones((2, 3, 6)))
    options: dict[str, Any] = {"group": adapter.mesh["tp"], "dtype": adapter.dtype("float64")}
    parts = adapter.module("linear", 6, 8)
    parallelize_module(parts, adapter.mesh, ColwiseParallel(parts=2, output_layouts=Shard(2)))
    layers = {
        "fused parts": lambda x: parts(x[:, None]),
        "own column": ColumnParallelLinear(10, 6, **options),
        "own row": RowParallelLinear(6, 10, **options),
        **{case: parallelize_module(adapter.module("Chain"), adapter.mesh, plan) for case, plan in CHAINS.items()},
    }
    found = {}
    for case, layer in layers.items():
        try:
            layer(x)
        except ValueError as error:
            found[case] = str(error)
    return found


@on_groups(2)
def test_a_plan_that_is_wrong_in_the_middle(platform: str, world_size: int) -> None:
    """What planning cannot see: the layer that is given the wrong width names itself and the likely cause."""
    part = "the input has 5 features (shape (2, 3, 5)); expected all 10, on every rank."
    layer = "Dense" if platform == "mindspore" else "Linear"
    expected = {
        "whole": f"block.second: {part} block.first may give each rank its part",
        "column": f"block.second: {part} A layer before it may give each rank its part",
        "row of all": f"block.second: {part} A layer before it may give each rank its part",
        "linear loss": f"block.second: {part} A layer before it may give each rank its part",
        "row": "block.second: the input has 10 features (shape (2, 3, 10)); expected 5, the part of rank",
        "fused parts": f"{layer}: found Shard(dim=2) for an output of shape (2, 1, 3, 4), whose features are made of",
        "own column": "ColumnParallelLinear: the input has 6 features (shape (2, 3, 6)); expected all 10",
        "own row": "RowParallelLinear: the input has 6 features (shape (2, 3, 6)); expected 3, the part of rank",
    }
    for found in run_distributed(chained, platform=platform, world_size=world_size):
        assert found.keys() == expected.keys()
        for case, text in expected.items():
            assert found[case].startswith(text), found[case]
