"""The Llama is Hugging Face's: same weight names, same config fields, same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.models.llama.rope import rope_tables
from tests.harness import run_distributed

SIZES = {
    "grouped": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "one head each": {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32},
    "own head size": {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 40, "head_dim": 16},
    "tied": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "tie_word_embeddings": True,
    },
    "long waves": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-6,
    },
    "biases": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def config_of(case: str) -> LlamaConfig:
    return LlamaConfig(vocab_size=67, intermediate_size=56, num_hidden_layers=2, **SIZES[case])


def both_models(case: str) -> tuple[Any, Any]:
    """Ours and the one of the transformers package, with the same random weights in float64."""
    import torch
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM as TheirModel

    from hyper_parallel.models.llama.torch import LlamaForCausalLM

    config = config_of(case)
    torch.manual_seed(0)
    theirs = TheirModel(TheirConfig(**config.to_hf())).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms too: ones would hide a norm that is left out
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    ours = LlamaForCausalLM(config).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.platform("torch")
@pytest.mark.parametrize("case", SIZES)
def test_logits_and_gradients_equal_those_of_transformers(case: str) -> None:
    import torch

    ours, theirs = both_models(case)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 67, (3, 50)))
    found, expected = ours(tokens), theirs(tokens).logits
    # transformers turns its rotary angles in float32, where a cosine is off by 6e-8
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(found.shape, dtype=found.dtype)
    found.backward(upstream)
    expected.backward(upstream)
    for (name, p), (their_name, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == their_name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)


def their_numbers(case: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Weights, token ids, a gradient of the logits; and what transformers makes of them: logits and gradients."""
    import torch
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM as TheirModel

    torch.manual_seed(0)
    model = TheirModel(TheirConfig(**config_of(case).to_hf())).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    random = np.random.default_rng(1)
    tokens, upstream = random.integers(0, 67, (3, 50)), random.standard_normal((3, 50, 67)).astype(np.float32)
    logits = model(torch.from_numpy(tokens)).logits
    logits.backward(torch.from_numpy(upstream))
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return weights, tokens, upstream, logits.detach().numpy(), gradients


def mindspore_numbers(
    case: str, weights: dict[str, np.ndarray], tokens: np.ndarray, upstream: np.ndarray, dtype: str = "float32"
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """In a worker of the harness: logits and gradients."""
    import mindspore
    from mindspore import Tensor

    from hyper_parallel.models.llama.mindspore import LlamaForCausalLM

    model = LlamaForCausalLM(config_of(case))
    parameters = dict(model.parameters_and_names())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.set_dtype(getattr(mindspore, dtype))
        parameter.set_data(Tensor(weights[name].astype(dtype)))
    forward = mindspore.value_and_grad(
        lambda ids: ((logits := model(ids)) * Tensor(upstream.astype(dtype)), logits),
        None,
        list(parameters.values()),
        has_aux=True,
    )
    (_, logits), gradients = forward(Tensor(tokens))
    return logits.asnumpy(), {name: g.asnumpy() for name, g in zip(parameters, gradients, strict=True)}


@pytest.mark.platform("mindspore")
@pytest.mark.parametrize("case", SIZES)
def test_on_mindspore_they_equal_those_of_transformers_too(case: str) -> None:
    weights, tokens, upstream, logits, gradients = their_numbers(case)
    found, found_gradients = run_distributed(
        mindspore_numbers, case, weights, tokens, upstream, platform="mindspore", world_size=1, timeout=60.0
    )[0]
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    assert found_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        difference = np.abs(found_gradients[name] - gradient).max()
        assert difference < 1e-5 * np.abs(gradient).max(), name


@pytest.mark.platform("mindspore")
def test_on_mindspore_it_computes_in_half_precision() -> None:
    weights, tokens, upstream, logits, gradients = their_numbers("grouped")
    found, found_gradients = run_distributed(
        mindspore_numbers, "grouped", weights, tokens, upstream, "float16", platform="mindspore", world_size=1,
        timeout=60.0,
    )[0]  # fmt: skip
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, logits, rtol=0, atol=0.01 * np.abs(logits).max())
    for name, gradient in gradients.items():
        assert np.abs(found_gradients[name] - gradient).max() < 0.02 * np.abs(gradient).max(), name


def masks_kept() -> list[int]:
    """In a worker of the harness: how many masks stay behind after rows of each length."""
    from mindspore import Tensor

    from hyper_parallel.models.llama.mindspore import LlamaForCausalLM

    model = LlamaForCausalLM(config_of("grouped"))
    kept = []
    for length in (3, 4, 3):
        model(Tensor(np.zeros((1, length), np.int32)))
        kept.append(len(model.model._tables))
    return kept


@pytest.mark.platform("mindspore")
def test_on_mindspore_one_mask_is_kept() -> None:
    assert run_distributed(masks_kept, platform="mindspore", world_size=1) == [[1, 1, 1]]


@pytest.mark.platform("torch")
def test_the_weight_names_are_those_of_a_checkpoint() -> None:
    import torch

    from hyper_parallel.models.llama.torch import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
    assert list(model.state_dict()) == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("case", SIZES)
def test_a_config_survives_its_json(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    read = LlamaConfig.from_hf(tmp_path)
    assert read == LlamaConfig.from_hf(tmp_path / "config.json") == LlamaConfig.from_hf(config.to_hf())
    assert read.to_hf() == config.to_hf()


def test_rope_theta_is_found_where_either_version_of_transformers_writes_it() -> None:
    assert LlamaConfig.from_hf({"rope_theta": 7.0}).rope_theta == 7.0
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert LlamaConfig.from_hf(newer).rope_theta == 7.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "mistral"}, "'model_type' is 'mistral'; this Llama has 'llama'"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' are not supported"),
        ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size .100. must be a multiple"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "must be a multiple of num_key_value_heads .4.",
        ),
        ({"head_dim": 5}, "even head size, found 5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, found 0"),
    ],
)
def test_what_this_llama_is_not_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(content)


def test_rope_tables_are_rotations_and_know_their_limit() -> None:
    config = LlamaConfig(max_position_embeddings=100)
    cos, sin = rope_tables(config, 100)
    assert cos.shape == sin.shape == (100, 32)
    np.testing.assert_allclose(cos**2 + sin**2, 1, atol=1e-6)
    np.testing.assert_allclose(cos[:, 0], np.cos(np.arange(100)), atol=1e-6)
    with pytest.raises(ValueError, match="101 tokens, but max_position_embeddings is 100"):
        rope_tables(config, 101)
