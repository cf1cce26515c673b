"""LlamaConfig: the fields of a Hugging Face ``config.json``, whatever the backend."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["LlamaConfig"]

_FIXED: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
}
"""What this Llama always is; a ``config.json`` that says otherwise describes another model."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama, named as in Hugging Face's ``config.json``. The defaults suit two CPU cores.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> LlamaConfig(hidden_size=256, num_attention_heads=8, num_key_value_heads=2).head_size
        32
    """

    vocab_size: int = 259
    """Token ids; the byte tokenizer needs 259: 256 bytes and three specials."""

    hidden_size: int = 128
    """Width of the residual stream."""

    intermediate_size: int = 352
    """Width inside the feed-forward layers."""

    num_hidden_layers: int = 2
    """Transformer layers."""

    num_attention_heads: int = 4
    """Query heads."""

    num_key_value_heads: int = 2
    """Key and value heads; each serves ``num_attention_heads / num_key_value_heads`` query heads."""

    head_dim: int | None = None
    """Width of a head; None: ``hidden_size / num_attention_heads``."""

    max_position_embeddings: int = 2048
    """Longest sequence."""

    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""

    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    tie_word_embeddings: bool = False
    """Whether the last layer shares the embedding's weight."""

    attention_bias: bool = False
    """Whether the four projections of attention add a bias."""

    mlp_bias: bool = False
    """Whether the three layers of the feed-forward part add one."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, found {value}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}), or head_dim be given"
            )
        if self.head_size % 2:
            raise ValueError(f"rotary embeddings need an even head size, found {self.head_size}")

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face ``config.json`` (the file, its folder, or its content as a mapping).

        Raises:
            ValueError: it describes something that this Llama is not (another model type or activation,
                scaled rotary embeddings); the message names the field, what was found and what was expected.
        """
        if isinstance(source, Mapping):
            content = dict(source)
        else:
            path = Path(source)
            content = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        for name, expected in _FIXED.items():
            if content.get(name, expected) != expected:
                raise ValueError(f"config field {name!r} is {content[name]!r}; this Llama has {expected!r}")
        rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rotary embeddings of type {kind!r} are not supported; expected 'default'")
        if "rope_theta" in rope:  # where transformers 5 writes it
            content["rope_theta"] = rope["rope_theta"]
        if content.get("num_key_value_heads") is None:  # a config from before grouped queries
            content["num_key_value_heads"] = content.get("num_attention_heads", cls.num_attention_heads)
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in content.items() if k in known})

    def to_hf(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            **_FIXED,
            **asdict(self),
            "head_dim": self.head_size,
        }
