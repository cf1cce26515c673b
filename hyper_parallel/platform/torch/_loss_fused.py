"""Whether fused kernels take some logits, and the kernels: those of Triton where they run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import lru_cache
from typing import Any

import torch

__all__ = ["fused_kernels"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fused_kernels(dim: int, *tensors: torch.Tensor) -> Any | None:
    """The module with ``row_statistics`` and ``row_gradients`` for matrices of these tensors; None: do without.

    They run on CUDA devices when Triton is installed (and, for tests, on CPU with ``TRITON_INTERPRET=1``), where the
    classes, in ``dim``, lie next to each other.
    """
    device = tensors[0].device.type
    if device != "cuda" and not (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    if any(x.dtype not in _DTYPES or (x.shape[dim] > 1 and x.stride(dim) != 1) for x in tensors):
        return None
    return _load()


@lru_cache(None)
def _load() -> Any | None:
    """The kernels, or a warning, once, that they are not to be had."""
    if importlib.util.find_spec("triton") is None:
        warnings.warn(
            "Triton is not installed: the loss runs on PyTorch's own kernels, which read the logits several times more",
            stacklevel=2,
        )
        return None
    return importlib.import_module("hyper_parallel.platform.torch._loss_triton")
