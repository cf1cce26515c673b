"""Small transformers models with random weights, the same on every rank, and what one device computes with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec

VOCAB = 251
KINDS = ("llama", "qwen2", "qwen3", "phi3", "gpt2")


def build(kind: str, *, tied: bool = False, heads: int = 4, key_values: int = 2, **more: Any) -> Any:
    """A model in float64 with weights that are no module's initial ones."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=8 * heads,
            n_layer=2,
            n_head=heads,
            n_positions=64,
            tie_word_embeddings=tied,
            attn_pdrop=0,
            resid_pdrop=0,
            embd_pdrop=0,
            bos_token_id=1,
            eos_token_id=2,
            **more,
        )
    else:
        config = transformers.CONFIG_MAPPING[kind](
            vocab_size=VOCAB,
            hidden_size=8 * heads,
            intermediate_size=46,  # over 4 ranks: (12, 12, 12, 10)
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=key_values,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **more,
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    generator = np.random.default_rng(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = 0.1 * generator.standard_normal(tuple(parameter.shape))
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(torch.from_numpy(values + is_norm))
    return model


def tokens(batch: int = 2, length: int = 10, seed: int = 3) -> Any:
    """Token ids, the same on every rank."""
    import torch

    return torch.from_numpy(np.random.default_rng(seed).integers(1, VOCAB, (batch, length)))


def own_part(whole: Any, parameter: Any, rank: int) -> Any:
    """What `rank` holds of a tensor that is cut as `parameter` is."""
    import torch

    spec: ShardSpec | None = getattr(parameter, "_shard_spec", None)
    if spec is None or spec.dim is None:
        return whole
    return torch.cat([whole[index] for index in spec.slices(rank)], spec.dim)


def gradient_error(reference: Any, model: Any, rank: int) -> tuple[float, str]:
    """The largest error of a gradient, relative to the largest element of the whole one, and where."""
    worst, where = 0.0, ""
    wholes = dict(reference.named_parameters())
    own = dict(model.named_parameters())
    assert list(wholes) == list(own)
    for name, parameter in own.items():
        whole = wholes[name].grad
        assert parameter.grad is not None, name
        expected = own_part(whole, parameter, rank)
        assert expected.shape == parameter.grad.shape, name
        error = float((expected - parameter.grad).abs().amax()) if expected.numel() else 0.0
        error /= float(whole.abs().amax())
        if error > worst:
            worst, where = error, name
    return worst, where


def value(x: Any) -> float:
    """A scalar, be it a DTensor or not."""
    return float(x.full_tensor() if hasattr(x, "full_tensor") else x)
