"""The library's own small Llama: its sizes, and random weights under Hugging Face's names."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from hyper_parallel.models.llama import LlamaConfig

OWN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def own_config(kind: str = "own") -> LlamaConfig:
    """Of ``"own"``, or of ``"own tied"``."""
    return LlamaConfig(**OWN, vocab_size=251, num_key_value_heads=2, tie_word_embeddings=kind == "own tied")


def own_tensors(tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (251, 32), "model.norm.weight": (32,)}
    for i in range(2):
        rows = {"q": 32, "k": 16, "v": 16, "o": 32}
        shapes |= {f"model.layers.{i}.self_attn.{n}_proj.weight": (size, 32) for n, size in rows.items()}
        shapes |= {f"model.layers.{i}.mlp.{n}_proj.weight": (48, 32) for n in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (32, 48)
        shapes |= {f"model.layers.{i}.{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
    if not tied:
        shapes["lm_head.weight"] = (251, 32)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def this_models() -> Any:
    """In a worker: the models of its platform, one module for each with the same functions."""
    return importlib.import_module(f"tests.checkpoint.{os.environ['HYPER_PARALLEL_PLATFORM']}_models")


def parts(model: Any) -> dict[str, np.ndarray]:
    """In a worker: what this rank holds (bfloat16 as float32)."""
    models = this_models()
    return {name: models.values(p) for name, p in models.named_parameters(model).items()}


def without_values(model: Any) -> bool:
    """In a worker: whether nothing of the model has memory."""
    models = this_models()
    return not any(models.has_memory(p) for p in models.named_parameters(model).values())


def all_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Bit by bit: memory that nobody has filled may hold NaN."""
    return found.keys() == expected.keys() and all(found[k].tobytes() == expected[k].tobytes() for k in expected)
