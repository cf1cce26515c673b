"""What the tensor-parallel tests need of a platform: modules, gradients, NumPy in and out. One file for each."""

from __future__ import annotations

import importlib
import os
from functools import cache

from tests.tensor_parallel.adapters.base import Adapter

__all__ = ["Adapter", "this_adapter"]


@cache
def this_adapter() -> Adapter:
    """In a worker: the adapter of its platform."""
    module = importlib.import_module(f"tests.tensor_parallel.adapters.{os.environ['HYPER_PARALLEL_PLATFORM']}")
    adapter: Adapter = module.make_adapter()
    return adapter
