"""What plans refuse: on every rank, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed, this_rank

pytestmark = pytest.mark.platform("torch")


def refused(case: str) -> None:
    import torch
    from torch import nn

    from hyper_parallel.core.placement_types import Partial, Replicate
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel
    from tests.tensor_parallel.small_models import build
    from tests.tensor_parallel.small_modules import tiny
    from tests.tensor_parallel.torch_workers import tp_mesh

    class Scaled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    model: Any = tiny(fused=case == "parts", tied=case == "tied")
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
        model.head = Scaled(6, 11)
        plan = {"head": "colwise"}
    elif case == "max_norm":
        model.embed.max_norm = 1.0
        plan = {"embed": "embedding_rowwise"}
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
        parallelize_module(model, tp_mesh(), plan)
    elif case == "one rank":
        plan = {"headd": "colwise"} if this_rank() == 1 else plan
    elif case == "other models":
        model.head = nn.Linear(6, 11 + this_rank())
    elif case == "query heads":
        model, plan = build("llama", heads=3, key_values=3), "auto"
    elif case == "key/value heads":
        model, plan = build("llama", heads=12, key_values=3), "auto"
    elif case == "left out":
        plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    elif case == "norm of heads":
        model = build("qwen3")
        plan = {f"layers.*.self_attn.{n}_proj": "rowwise" if n == "o" else "colwise" for n in "qkvo"}
    elif case == "mixture of experts":
        import transformers

        config = transformers.MixtralConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2,
        )  # fmt: skip
        model, plan = transformers.MixtralForCausalLM(config), "auto"
    shapes = [tuple(p.shape) for p in model.parameters()]
    try:
        parallelize_module(model, tp_mesh(), plan)
    finally:
        if case != "twice":
            assert shapes == [tuple(p.shape) for p in model.parameters()]
        assert all(type(m).__name__ != "ParallelLinear" for m in model.modules()) or case == "twice"
        assert torch.is_grad_enabled()


REFUSED = {
    "misspelt": ("names no module", "near matches: layers.*.mlp.up", "layers.*.mlp.down"),
    "unknown kind": ("'colwize'", "'colwise_gather_output'"),
    "experts": ("'moe_tp_experts' is not supported", "mixture-of-experts"),
    "not a layer": ("RowwiseParallel cannot treat layers.0.norm", "LayerNorm"),
    "own forward": ("ColwiseParallel cannot treat head", "Scaled"),
    "max_norm": ("embed", "max_norm=1.0"),
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
    "query heads": ("model.layers.0.self_attn", "3 attention heads", "2 tensor-parallel ranks"),
    "key/value heads": ("3 key/value heads", "2 tensor-parallel ranks"),
    "left out": ("layers.0.mlp.gate has parameters", "among features that are sharded", "give it a rule"),
    "norm of heads": ("self_attn.q_norm", "replicated_with_grad_allreduce"),
    "mixture of experts": ("not supported", "mixture-of-experts"),
}


@pytest.mark.contract("T4")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(case: str) -> None:
    errors = run_distributed(refused, case, world_size=2, expect_error=True, timeout=60.0)
    for error in errors:
        assert error.type == "ParallelPlanError", error
        for text in REFUSED[case]:
            assert text in error.message, error.message
    if case == "one rank":
        assert errors[0].message.startswith("rank 1: ")


def not_a_tensor() -> None:
    import torch

    from hyper_parallel.core.placement_types import Replicate
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from tests.tensor_parallel.small_modules import Outer
    from tests.tensor_parallel.torch_workers import tp_mesh

    style = PrepareModuleInput(input_layouts=(Replicate(),) * 2, desired_input_layouts=(Replicate(),) * 2)
    model = parallelize_module(Outer(), tp_mesh(), style)
    model(torch.ones(2, 6), "kept", scale=1)


def test_a_placement_for_what_is_no_tensor() -> None:
    for error in run_distributed(not_a_tensor, world_size=2, expect_error=True):
        assert error.type == "TypeError" and "for a str" in error.message


def not_a_module() -> None:
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.torch_workers import tp_mesh

    parallelize_module([1], tp_mesh(), {})  # type: ignore[arg-type]


def test_not_a_module() -> None:
    for error in run_distributed(not_a_module, world_size=2, expect_error=True):
        assert error.type == "TypeError" and "found list" in error.message
