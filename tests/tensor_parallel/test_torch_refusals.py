"""What plans refuse of models of transformers: on every rank, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed

pytest.importorskip("transformers")
pytestmark = pytest.mark.platform("torch")


def refused(case: str) -> None:
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.small_models import build
    from tests.tensor_parallel.torch_workers import tp_mesh

    model: Any = None
    plan: Any = "auto"
    if case == "query heads":
        model = build("llama", heads=3, key_values=3)
    elif case == "key/value heads":
        model = build("llama", heads=12, key_values=3)
    elif case == "norm of heads":
        model = build("qwen3")
        plan = {f"layers.*.self_attn.{n}_proj": "rowwise" if n == "o" else "colwise" for n in "qkvo"}
    elif case == "mixture of experts":
        import transformers

        config = transformers.MixtralConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config)
    shapes = [tuple(p.shape) for p in model.parameters()]
    try:
        parallelize_module(model, tp_mesh(), plan)
    finally:
        assert shapes == [tuple(p.shape) for p in model.parameters()]


REFUSED = {
    "query heads": ("model.layers.0.self_attn", "3 attention heads", "2 tensor-parallel ranks"),
    "key/value heads": ("3 key/value heads", "2 tensor-parallel ranks"),
    "norm of heads": ("self_attn.q_norm", "replicated_with_grad_allreduce"),
    "mixture of experts": ("not supported", "mixture-of-experts"),
}


@pytest.mark.contract("T4")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(case: str) -> None:
    for error in run_distributed(refused, case, world_size=2, expect_error=True, timeout=60.0):
        assert error.type == "ParallelPlanError", error
        for text in REFUSED[case]:
            assert text in error.message, error.message
