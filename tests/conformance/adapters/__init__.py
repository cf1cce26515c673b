"""What the conformance suite needs of a platform: NumPy in, NumPy out. One file for each."""

from __future__ import annotations

import importlib
import os
from functools import cache

from tests.conformance.adapters.base import Adapter, Collective, Differentiated

__all__ = ["Adapter", "Collective", "Differentiated", "this_adapter"]


@cache
def this_adapter() -> Adapter:
    """In a worker: the adapter of its platform."""
    module = importlib.import_module(f"tests.conformance.adapters.{os.environ['HYPER_PARALLEL_PLATFORM']}")
    adapter: Adapter = module.make_adapter()
    return adapter
