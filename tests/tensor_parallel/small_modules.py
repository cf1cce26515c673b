"""Small PyTorch modules that the style tests share out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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


class Outer(nn.Module):
    """A module that takes a tensor, another by keyword, and gives two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, flag: str, *, scale: Any) -> Any:
        assert flag == "kept"
        return self.inner(x) * scale, x.shape


def tiny(fused: bool = False, tied: bool = False) -> Tiny:
    """In float64, the same on every rank."""
    torch.manual_seed(0)
    return Tiny(fused, tied).double()
