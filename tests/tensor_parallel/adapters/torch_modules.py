"""Small PyTorch models. The file beside this one has the same for MindSpore."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.models.llama import LlamaConfig, build_llama

VOCAB, WIDTH, INNER = 11, 6, 10


class MLP(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up_proj = nn.Linear(WIDTH, 2 * INNER)
        else:
            self.gate = nn.Linear(WIDTH, INNER)
            self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(torch.sigmoid(gate) * up)


class Block(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP(fused)

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


class Tiny(nn.Module):
    """Embedding, two blocks, norm, head."""

    def __init__(self, fused: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(fused) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Chain(nn.Module):
    """Two layers whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"first": nn.Linear(WIDTH, INNER), "second": nn.Linear(INNER, WIDTH)})

    def forward(self, x: Any) -> Any:
        return self.block["second"](torch.sigmoid(self.block["first"](x)))


class Outer(nn.Module):
    """A module that takes a tensor, another by keyword, and gives two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, flag: str, *, scale: Any) -> Any:
        assert flag == "kept"
        return self.inner(x) * scale, x.shape


class Attention(nn.Module):
    """Grouped queries, every token with every other; projections apart or in one."""

    def __init__(self, heads: int, key_values: int, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, key_values, 2
        self.fused = fused
        width = 2 * heads
        if fused:
            self.qkv_proj = nn.Linear(width, 2 * (heads + 2 * key_values))
        else:
            self.q_proj = nn.Linear(width, 2 * heads)
            self.k_proj = nn.Linear(width, 2 * key_values)
            self.v_proj = nn.Linear(width, 2 * key_values)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        heads, key_values, size = self.num_heads, self.num_key_value_heads, self.head_dim
        if self.fused:
            q, k, v = self.qkv_proj(x).split([size * heads, size * key_values, size * key_values], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.view(batch, length, -1, size).transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(heads // key_values, 1) for y in (k, v))
        mixed = torch.sigmoid(q @ k.transpose(-1, -2)) @ v  # a softmax has no gradient for a bias of keys
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class AttentionModel(nn.Module):
    """Attention as a part of something."""

    def __init__(self, heads: int, key_values: int, fused: bool) -> None:
        super().__init__()
        self.attn = Attention(heads, key_values, fused)

    def forward(self, x: Any) -> Any:
        return x + self.attn(x)


class Scaled(nn.Linear):
    """A layer whose arithmetic is its own."""

    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=bias)


def embedding(rows: int, width: int, **options: Any) -> nn.Module:
    return nn.Embedding(rows, width, **options)


def own_llama(tied: bool, key_values: int) -> nn.Module:
    model: nn.Module = build_llama(
        LlamaConfig(
            vocab_size=251,
            hidden_size=32,
            intermediate_size=46,  # over 4 ranks: (12, 12, 12, 10)
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=key_values,
            tie_word_embeddings=tied,
        )
    )
    return model
