"""Llama in PyTorch: ordinary single-device code with the weight names of Hugging Face's ``LlamaForCausalLM``.

Nothing here knows of parallelism; a trainer adds it from outside.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.models.llama.rope import rope_tables

__all__ = ["LlamaForCausalLM", "LlamaModel"]


class LlamaRMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dim, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class LlamaAttention(nn.Module):
    """Causal attention with grouped queries and rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, bias = config.head_size, config.attention_bias
        self.head_size = size
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[batch, length, hidden]`` to the same shape.

        Args:
            x: hidden states.
            cos: ``[length, head_size]``, or ``[batch, 1, length, head_size]``.
            sin: as ``cos``.
            mask: bool ``[batch, 1, length, length]``, true where a token (dim 2) sees another (dim 3); None: each sees
                itself and all before it.
        """
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:  # [batch, heads, length, head_size]
            return y.view(batch, length, -1, self.head_size).transpose(1, 2)

        query, key, value = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Same shape as ``x``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Everything but the last layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        # No buffers: a model built without memory has no values to keep, and checkpoints need none of them.
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Token ids ``[batch, length]`` to hidden states ``[batch, length, hidden]``.

        Args:
            input_ids: the tokens.
            position_ids: int64 ``[batch, length]``, the place of each token in its document: within a row they count
                up, and start again at 0 with each document; tokens see their own document only. None: a row is one.
        """
        x = self.embed_tokens(input_ids)
        cos, sin = self._rotary(input_ids.shape[1], x)
        mask = None
        if position_ids is not None:
            mask = _document_mask(position_ids)
            cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def _rotary(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (length, like.device, like.dtype)
        if key not in self._tables:
            cos, sin = (torch.from_numpy(table) for table in rope_tables(self.config, length))
            # not .to(like): the tables are whole, whatever becomes of the activations
            self._tables[key] = (cos.to(like.device, like.dtype), sin.to(like.device, like.dtype))
        return self._tables[key]


def _document_mask(position_ids: Tensor) -> Tensor:
    """Bool ``[batch, 1, length, length]``, true where dim 3 is in the document of dim 2, and not behind it."""
    length = position_ids.shape[1]
    places = torch.arange(length, device=position_ids.device)
    begins = places - position_ids  # where its document begins: what the tokens of a document have in common
    together = begins.unsqueeze(2) == begins.unsqueeze(1)
    return (together & (places.unsqueeze(1) >= places)).unsqueeze(1)


class LlamaForCausalLM(nn.Module):
    """The model with its last layer. Weights are uninitialised: load some, or draw them.

    Example:
        >>> model = LlamaForCausalLM(LlamaConfig())
        >>> model.load_state_dict(weights)                    # doctest: +SKIP
        >>> model(torch.tensor([[72, 105]])).shape
        torch.Size([1, 2, 259])
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Token ids ``[batch, length]`` to logits ``[batch, length, vocab_size]``; see :class:`LlamaModel`."""
        logits: Tensor = self.lm_head(self.model(input_ids, position_ids))
        return logits
