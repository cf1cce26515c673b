"""Llama in MindSpore: ordinary single-device code with the weight names of Hugging Face's ``LlamaForCausalLM``.

Nothing here knows of parallelism; a trainer adds it from outside. The operators that MindSpore's CPU backend lacks come
from the platform.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer

from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.models.llama.rope import rope_tables
from hyper_parallel.platform.mindspore.attention import attention, rotate
from hyper_parallel.platform.mindspore.embedding import Embedding
from hyper_parallel.platform.mindspore.rms_norm import rms_norm

__all__ = ["LlamaForCausalLM", "LlamaModel"]


class LlamaRMSNorm(nn.Cell):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dim, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", [size]), name="weight")
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        return rms_norm(x, self.weight, self.eps)


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

    def construct(self, x: Tensor, tables: RotaryTables) -> Tensor:
        """``[batch, length, hidden]`` to the same shape."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:  # [batch, heads, length, head_size]
            return ops.transpose(y.reshape(batch, length, -1, self.head_size), (0, 2, 1, 3))

        query, key, value = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        query, key = (rotate(x, tables.cos, tables.sin) for x in (query, key))
        mixed = ops.transpose(attention(query, key, value, tables.mask), (0, 2, 1, 3))
        return self.o_proj(mixed.reshape(batch, length, -1))


class RotaryTables:
    """What attention needs of positions: cosines, sines, and who sees whom, for all rows or for each of a batch.

    Args:
        cos: ``[rows, 1, length, head_size]``; ``rows`` is 1 or that of the batch.
        sin: as ``cos``.
        mask: ``[rows, 1, length, length]``, what is added to a score: 0, or minus infinity.
    """

    def __init__(self, cos: Tensor, sin: Tensor, mask: Tensor) -> None:
        self.cos, self.sin, self.mask = cos, sin, mask

    @classmethod
    def of(cls, config: LlamaConfig, length: int, dtype: Any) -> RotaryTables:
        """Positions ``0 .. length - 1``, each of which sees itself and all before it."""
        cos, sin = (Tensor(table[None, None], dtype) for table in rope_tables(config, length))
        mask = np.triu(np.full((1, 1, length, length), -np.inf, np.float32), 1)
        return cls(cos, sin, Tensor(mask, dtype))

    def in_documents(self, position_ids: Tensor) -> RotaryTables:
        """For ``position_ids`` ``[batch, length]``, which start again at 0 with each document."""
        batch, length = position_ids.shape
        flat = position_ids.reshape(-1)

        def at(table: Tensor) -> Tensor:
            return ops.gather(table.reshape(length, -1), flat, 0).reshape(batch, 1, length, -1)

        places = Tensor(np.tile(np.arange(length), (batch, 1)), position_ids.dtype)
        begins = places - position_ids  # where its document begins: what the tokens of a document have in common
        rows = ops.tile(begins.reshape(batch, length, 1), (1, 1, length))
        columns = ops.tile(begins.reshape(batch, 1, length), (1, length, 1))
        mask = ops.masked_fill(ops.tile(self.mask[0], (batch, 1, 1)), ops.not_equal(rows, columns), -np.inf)
        return RotaryTables(at(self.cos), at(self.sin), mask.reshape(batch, 1, length, length))


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

    def construct(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Token ids ``[batch, length]`` to hidden states ``[batch, length, hidden]``.

        Args:
            input_ids: the tokens.
            position_ids: int ``[batch, length]``, the place of each token in its document: within a row they count up,
                and start again at 0 with each document; tokens see their own document only. None: a row is one.
        """
        x = self.embed_tokens(input_ids)
        tables = self._rotary(input_ids.shape[1], x.dtype)
        if position_ids is not None:
            tables = tables.in_documents(position_ids)
        for layer in self.layers:
            x = layer(x, tables)
        return self.norm(x)

    def _rotary(self, length: int, dtype: Any) -> RotaryTables:
        key = (length, dtype)
        if key not in self._tables:
            self._tables.clear()  # masks are as large as the length squared: one is kept
            self._tables[key] = RotaryTables.of(self.config, length, dtype)
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

    def construct(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Token ids ``[batch, length]`` to logits ``[batch, length, vocab_size]``; see :class:`LlamaModel`."""
        logits: Tensor = self.lm_head(self.model(input_ids, position_ids))
        return logits
