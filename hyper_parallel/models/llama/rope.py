"""Rotary position embeddings (Su et al., arXiv 2104.09864) in NumPy, the same numbers for every backend."""

from __future__ import annotations

import numpy as np

from hyper_parallel.models.llama.config import LlamaConfig

__all__ = ["rope_tables"]


def rope_tables(config: LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine for positions ``0 .. length - 1``: two float32 arrays ``[length, head_size]``.

    Dims ``i`` and ``i + head_size / 2`` of a head turn together by ``position * rope_theta^(-2i /
    head_size)``, the order of Hugging Face's Llama weights. Angles are float32, as they are there.

    Raises:
        ValueError: ``length`` exceeds ``max_position_embeddings``.
    """
    if length > config.max_position_embeddings:
        raise ValueError(
            f"sequences of {length} tokens, but max_position_embeddings is {config.max_position_embeddings}"
        )
    size = config.head_size
    frequencies = (config.rope_theta ** -(np.arange(0, size, 2) / size)).astype(np.float32)
    half = np.outer(np.arange(length, dtype=np.float32), frequencies).astype(np.float64)
    angles = np.concatenate([half, half], axis=-1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
