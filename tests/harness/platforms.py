"""The platforms tests can run on: which are installed, and which the user asked for."""

from __future__ import annotations

import importlib.util
import os

PLATFORMS = ("torch", "mindspore")
DISPLAY_NAMES = {"torch": "PyTorch", "mindspore": "MindSpore"}

_selected: set[str] = set(PLATFORMS)


def check_platform(platform: str) -> None:
    """Raise `ValueError` for a name that is not a platform's."""
    if platform not in PLATFORMS:
        raise ValueError(f"unknown platform {platform!r}, expected one of {PLATFORMS}")


def select_platforms(platforms: set[str]) -> None:
    """Restrict the run to `platforms` (the --platform option)."""
    for platform in platforms:
        check_platform(platform)
    _selected.clear()
    _selected.update(platforms)


def why_not_here(platform: str) -> str | None:
    """The reason why tests of `platform` cannot run in this process, None when they can.

    Looks for the package without importing it: the parent process stays free of both frameworks.
    """
    check_platform(platform)
    if importlib.util.find_spec(platform) is None:
        return f"{DISPLAY_NAMES[platform]} is not installed"
    if platform not in _selected:
        return f"{DISPLAY_NAMES[platform]} was not selected by --platform"
    return None


def this_rank() -> int:
    """This worker's rank. For functions that run in a worker."""
    return _from_environment("RANK")


def this_world_size() -> int:
    """The size of this worker's group. For functions that run in a worker."""
    return _from_environment("WORLD_SIZE")


def _from_environment(name: str) -> int:
    value = os.environ.get(name)
    if value is None:
        raise RuntimeError(f"{name} is not set: call this in a function that run_distributed() runs")
    return int(value)
