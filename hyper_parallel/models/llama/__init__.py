"""Llama: sizes and initial weights that every backend shares, and the model of this process's backend."""

from __future__ import annotations

import importlib
from typing import Any

from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.platform import get_platform

__all__ = ["LlamaConfig", "build_llama"]


def build_llama(config: LlamaConfig) -> Any:
    """``LlamaForCausalLM`` of this process's backend.

    Its weights are not the model's yet: ``materialize`` and ``load_hf_checkpoint`` give them their values, and it is
    best built without any (PyTorch's meta device, MindSpore's ``deferred_parameters``).
    """
    module = importlib.import_module(f"hyper_parallel.models.llama.{get_platform().name}")
    return module.LlamaForCausalLM(config)
