"""Modules whose buffers or parameters take some care when they are built without memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class OldRotary(nn.Module):
    """As in transformers 4: a function of the config, the buffer also as a plain attribute."""

    def __init__(self, config: Any, device: Any = None, scale: float = 1.0) -> None:
        super().__init__()
        self.config = config
        self.rope_init_fn = old_rope_init
        inv_freq, self.scaling = self.rope_init_fn(config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.original_inv_freq = self.inv_freq


def old_rope_init(config: Any, device: Any) -> tuple[Tensor, float]:
    return config.base ** -(torch.arange(0, config.size, 2, device=device) / config.size), 1.0


class FromConfig(nn.Module):
    """All that its buffers depend on is the config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mask", torch.ones(config.size, config.size).tril(), persistent=False)


class Unknown(nn.Module):
    """Nobody outside can know what the buffer was made from."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((4,), base), persistent=False)


class Mean(nn.Module):
    """A persistent buffer: part of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mean", torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)


def odd_model(*, unknown: bool = False, mean: bool = False) -> nn.Module:
    config = SimpleNamespace(size=6, base=100.0)
    children: dict[str, nn.Module] = {"old": OldRotary(config), "mask": FromConfig(config), "linear": nn.Linear(6, 5)}
    if unknown:
        children["unknown"] = Unknown(3.0)
    if mean:
        children["mean"] = Mean()
    return nn.ModuleDict(children)
