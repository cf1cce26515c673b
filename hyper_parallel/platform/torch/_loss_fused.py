"""Whether fused kernels take some logits, and the kernels: Triton's on GPUs, compiled ones on CPUs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import lru_cache
from typing import Any

import torch

from hyper_parallel.platform.native.rows import row_kernels
from hyper_parallel.platform.torch._loss_compiled import CompiledKernels, takes

__all__ = ["fused_kernels"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def fused_kernels(dim: int, *tensors: torch.Tensor) -> Any | None:
    """What has ``row_statistics`` and ``row_gradients`` for matrices of these tensors; None: do without.

    On CUDA devices when Triton is installed (and, for tests, on CPU with ``TRITON_INTERPRET=1``); on CPUs, in any dtype
    but fp64, when they were compiled. The classes, in ``dim``, have to lie next to each other.
    """
    device = tensors[0].device.type
    if device not in ("cuda", "cpu") or any(x.shape[dim] > 1 and x.stride(dim) != 1 for x in tensors):
        return None
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return _load() if all(x.dtype in _DTYPES for x in tensors) else None
    kernels = row_kernels() if all(map(takes, tensors)) else None
    return None if kernels is None else CompiledKernels(kernels)


@lru_cache(None)
def _load() -> Any | None:
    """The Triton kernels, or a warning, once, that they are not to be had."""
    if importlib.util.find_spec("triton") is None:
        warnings.warn(
            "Triton is not installed: the loss runs on PyTorch's own kernels, which read the logits several times more",
            stacklevel=2,
        )
        return None
    return importlib.import_module("hyper_parallel.platform.torch._loss_triton")
