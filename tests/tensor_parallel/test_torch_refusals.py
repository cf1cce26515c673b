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
    elif case in ATTENTION:
        model, plan = attention(case)
    shapes = [tuple(p.shape) for p in model.parameters()]
    try:
        parallelize_module(model, tp_mesh(), plan)
    finally:
        assert shapes == [tuple(p.shape) for p in model.parameters()]


ATTENTION = ("bloom", "gpt_bigcode", "gpt_bigcode many", "codegen", "t5", "mpt")
"""Attention that computes something else with a share of its heads, under a plan that names its projections."""


def attention(kind: str) -> Any:
    import transformers

    gpt = {"vocab_size": 16, "n_embd": 32, "n_layer": 1, "n_head": 4}
    fused = {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"}
    query_key_value = {
        f"h.*.self_attention.{name}": how for name, how in (("query_key_value", "colwise"), ("dense", "rowwise"))
    }
    config, plan = {
        "bloom": lambda: (
            transformers.BloomConfig(vocab_size=16, hidden_size=32, n_layer=1, n_head=4),
            query_key_value,
        ),
        "gpt_bigcode": lambda: (transformers.GPTBigCodeConfig(**gpt), fused),
        "gpt_bigcode many": lambda: (transformers.GPTBigCodeConfig(**gpt, multi_query=False), fused),
        "codegen": lambda: (
            transformers.CodeGenConfig(**gpt, rotary_dim=4),
            {"transformer.h.*.attn.qkv_proj": "colwise", "transformer.h.*.attn.out_proj": "rowwise"},
        ),
        "mpt": lambda: (
            transformers.MptConfig(vocab_size=16, d_model=32, n_layers=1, n_heads=4),
            {"blocks.*.attn.Wqkv": "colwise", "blocks.*.attn.out_proj": "rowwise"},
        ),
        "t5": lambda: (
            transformers.T5Config(vocab_size=16, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
            {
                "encoder.block.*.layer.0.SelfAttention.[qkv]": "colwise",
                "encoder.block.*.layer.0.SelfAttention.o": "rowwise",
            },
        ),
    }[kind]()
    if kind == "t5":
        return transformers.T5Model(config), plan
    return transformers.AutoModelForCausalLM.from_config(config), plan


REFUSED = {
    "bloom": ("h.0.self_attention: its heads cannot be shared", "'alibi'"),
    "gpt_bigcode": ("h.0.attn: its heads cannot be shared", "multi_query"),
    "gpt_bigcode many": ("h.0.attn: its heads cannot be shared", "multi_query"),
    "codegen": ("h.0.attn: its heads cannot be shared", "mp_num"),
    "mpt": ("blocks.0.attn: its heads cannot be shared", "'position_bias'"),
    "t5": ("SelfAttention: its heads cannot be shared", "'position_bias'"),
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
