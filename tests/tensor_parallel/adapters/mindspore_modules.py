"""Small MindSpore models. The file beside this one has the same for PyTorch.

Layers of ``nn`` and of ``mint.nn`` both; ``mint.nn.Embedding`` only where it is shared out, as it has no CPU kernel.
"""

from __future__ import annotations

from typing import Any

from mindspore import mint, nn, ops

from hyper_parallel.models.llama import LlamaConfig, build_llama

VOCAB, WIDTH, INNER = 11, 6, 10


class MLP(nn.Cell):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up_proj = nn.Dense(WIDTH, 2 * INNER)
        else:
            self.gate = nn.Dense(WIDTH, INNER)
            self.up = mint.nn.Linear(WIDTH, INNER)
        self.down = mint.nn.Linear(INNER, WIDTH)

    def construct(self, x: Any) -> Any:
        gate, up = ops.chunk(self.gate_up_proj(x), 2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(ops.sigmoid(gate) * up)


class Block(nn.Cell):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm([WIDTH], epsilon=1e-5)
        self.mlp = MLP(fused)

    def construct(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


class Tiny(nn.Cell):
    """Embedding, two blocks, norm, head."""

    def __init__(self, fused: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.CellList([Block(fused) for _ in range(2)])
        self.norm = nn.LayerNorm([WIDTH], epsilon=1e-5)
        self.head = nn.Dense(WIDTH, VOCAB, has_bias=False)
        if tied:
            self.head.weight = self.embed.embedding_table

    def construct(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Pair(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(WIDTH, INNER), mint.nn.Linear(INNER, WIDTH)


class Chain(nn.Cell):
    """Two layers whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Pair()

    def construct(self, x: Any) -> Any:
        return self.block.second(ops.sigmoid(self.block.first(x)))


class Outer(nn.Cell):
    """A module that takes a tensor, another by keyword, and gives two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(WIDTH, WIDTH)

    def construct(self, x: Any, flag: str, *, scale: Any) -> Any:
        assert flag == "kept"
        return self.inner(x) * scale, x.shape


class Attention(nn.Cell):
    """Grouped queries, every token with every other; projections apart or in one."""

    def __init__(self, heads: int, key_values: int, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, key_values, 2
        self.fused = fused
        width = 2 * heads
        if fused:
            self.qkv_proj = nn.Dense(width, 2 * (heads + 2 * key_values))
        else:
            self.q_proj = nn.Dense(width, 2 * heads)
            self.k_proj = mint.nn.Linear(width, 2 * key_values)
            self.v_proj = nn.Dense(width, 2 * key_values)
        self.o_proj = nn.Dense(width, width)

    def construct(self, x: Any) -> Any:
        batch, length, _ = x.shape
        heads, key_values, size = self.num_heads, self.num_key_value_heads, self.head_dim
        if self.fused:
            q, k, v = ops.split(self.qkv_proj(x), [size * heads, size * key_values, size * key_values], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (ops.reshape(y, (batch, length, -1, size)).swapaxes(1, 2) for y in (q, k, v))
        k, v = (ops.repeat_interleave(y, heads // key_values, 1) for y in (k, v))
        mixed = ops.matmul(ops.sigmoid(ops.matmul(q, k.swapaxes(-1, -2))), v)
        return self.o_proj(ops.reshape(mixed.swapaxes(1, 2), (batch, length, -1)))


class AttentionModel(nn.Cell):
    """Attention as a part of something."""

    def __init__(self, heads: int, key_values: int, fused: bool) -> None:
        super().__init__()
        self.attn = Attention(heads, key_values, fused)

    def construct(self, x: Any) -> Any:
        return x + self.attn(x)


class Scaled(nn.Dense):
    """A layer whose arithmetic is its own."""

    def construct(self, x: Any) -> Any:
        return 2 * super().construct(x)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Cell:
    return nn.Dense(inputs, outputs, has_bias=bias)


def embedding(rows: int, width: int, **options: Any) -> nn.Cell:
    return mint.nn.Embedding(rows, width, **options) if options else nn.Embedding(rows, width)


def own_llama(tied: bool, key_values: int) -> nn.Cell:
    model: nn.Cell = build_llama(
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
