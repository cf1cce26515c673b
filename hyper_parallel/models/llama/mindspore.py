"""Llama in MindSpore: ordinary single-device code with the weight names of Hugging Face's ``LlamaForCausalLM``.

Nothing here knows of parallelism; a trainer adds it from outside. Of several ways to say the same, those were taken
that the CPU backend has kernels for, and fast ones: it is slow where shapes are broadcast or memory is strided.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer

from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.models.llama.rope import rope_tables
from hyper_parallel.platform.mindspore.embedding import Embedding

__all__ = ["LlamaForCausalLM", "LlamaModel"]


class LlamaRMSNorm(nn.Cell):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dim, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", [size]), name="weight")
        self.size, self.eps = size, eps

    def construct(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        wide = x.astype(mindspore.float32)
        scale = ops.rsqrt(ops.mean(ops.square(wide), -1, True) + self.eps)
        scale = ops.tile(scale, (1,) * (x.ndim - 1) + (self.size,))
        return (wide * scale).astype(x.dtype) * self.weight


class LlamaAttention(nn.Cell):
    """Causal attention with grouped queries and rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, bias = config.head_size, config.attention_bias
        self.head_size = size
        self.q_proj = mint.nn.Linear(config.hidden_size, config.num_attention_heads * size, bias=bias)
        self.k_proj = mint.nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.v_proj = mint.nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.o_proj = mint.nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=bias)
        self.product_with_transposed = ops.BatchMatMul(transpose_b=True)

    def construct(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """``[batch, length, hidden]`` to the same shape."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:  # [batch, heads, length, head_size]
            return ops.transpose(y.reshape(batch, length, -1, self.head_size), (0, 2, 1, 3))

        query, key, value = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        query, key = tables.rotate(query) * self.head_size**-0.5, tables.rotate(key)
        queries, groups = query.shape[1], key.shape[1]
        if groups != queries:
            key, value = (ops.repeat_interleave(t, queries // groups, 1) for t in (key, value))
        scores = self.product_with_transposed(query, key)
        weights = ops.softmax(scores + ops.tile(tables.mask, (batch, queries, 1, 1)), -1)
        mixed = ops.transpose(ops.matmul(weights, value), (0, 2, 1, 3))
        return self.o_proj(mixed.reshape(batch, length, -1))


class RotaryTables:
    """What attention needs of positions ``0 .. length - 1``: cosines, sines, and who sees whom."""

    def __init__(self, config: LlamaConfig, length: int, dtype: Any) -> None:
        self.cos, self.sin = (Tensor(table, dtype) for table in rope_tables(config, length))
        self.mask = Tensor(np.triu(np.full((1, 1, length, length), -np.inf, np.float32), 1), dtype)

    def rotate(self, x: Tensor) -> Tensor:
        """``[batch, heads, length, head_size]``, each position by its angles."""
        first, second = ops.chunk(x, 2, -1)
        copies = (*x.shape[:2], 1, 1)
        return x * ops.tile(self.cos, copies) + ops.concat((-second, first), -1) * ops.tile(self.sin, copies)


class LlamaMLP(nn.Cell):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = mint.nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = mint.nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = mint.nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def construct(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        return self.down_proj(ops.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Cell):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """Same shape as ``x``."""
        x = x + self.self_attn(self.input_layernorm(x), tables)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Cell):
    """Everything but the last layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.CellList([LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._tables: dict[tuple[int, Any], RotaryTables] = {}

    def construct(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[batch, length]`` to hidden states ``[batch, length, hidden]``."""
        x = self.embed_tokens(input_ids)
        tables = self._rotary(input_ids.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, tables)
        return self.norm(x)

    def _rotary(self, length: int, dtype: Any) -> RotaryTables:
        key = (length, dtype)
        if key not in self._tables:
            self._tables[key] = RotaryTables(self.config, length, dtype)
        return self._tables[key]


class LlamaForCausalLM(nn.Cell):
    """The model with its last layer.

    Example:
        >>> model = LlamaForCausalLM(LlamaConfig())
        >>> model(Tensor([[72, 105]])).shape
        (1, 2, 259)
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = mint.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def construct(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[batch, length]`` to logits ``[batch, length, vocab_size]``."""
        logits: Tensor = self.lm_head(self.model(input_ids))
        return logits
