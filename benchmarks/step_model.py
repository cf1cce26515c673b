"""The model whose training step is measured on every backend."""

from __future__ import annotations

from hyper_parallel.models.llama import LlamaConfig

__all__ = ["step_model"]


def step_model(quick: bool) -> LlamaConfig:
    """Small, but for its vocabulary."""
    return LlamaConfig(
        vocab_size=8192 if quick else 32768,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
