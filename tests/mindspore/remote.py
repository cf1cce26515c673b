"""Run a function of a module of this folder that imports MindSpore, which the parent does not."""

from __future__ import annotations

import importlib
from typing import Any

from tests.harness import run_distributed

__all__ = ["run"]


def run(module: str, function: str, *args: Any, world_size: int, **options: Any) -> list[Any]:
    """``function(*args)`` of ``tests.mindspore.<module>`` on every rank."""
    return run_distributed(call, module, function, args, platform="mindspore", world_size=world_size, **options)


def call(module: str, function: str, args: tuple[Any, ...]) -> Any:
    """In a worker."""
    return getattr(importlib.import_module(f"tests.mindspore.{module}"), function)(*args)
