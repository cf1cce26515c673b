"""Run a function of a module that imports a framework, which the parent does not."""

from __future__ import annotations

import importlib
from typing import Any

from tests.harness import run_distributed


def call(module: str, name: str, *args: Any) -> Any:
    """In a worker: ``tests.core.<module>.<name>(*args)``."""
    return getattr(importlib.import_module(f"tests.core.{module}"), name)(*args)


def run(module: str, name: str, *args: Any, world_size: int, timeout: float = 60.0) -> list[Any]:
    """In the parent: the value of every rank."""
    return run_distributed(call, module, name, *args, platform="torch", world_size=world_size, timeout=timeout)
