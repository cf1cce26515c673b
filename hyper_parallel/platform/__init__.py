"""Which backend this process uses: explicit choice, then ``HYPER_PARALLEL_PLATFORM``, then what is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Literal

from hyper_parallel.errors import PlatformError, how_to_install
from hyper_parallel.platform.platform import Group, Platform

__all__ = ["Group", "Platform", "default_backend", "get_platform"]

_BACKENDS = ("torch", "mindspore")
_ENVIRONMENT_VARIABLE = "HYPER_PARALLEL_PLATFORM"
_registry: dict[str, Platform] = {}


def get_platform(name: str | None = None) -> Platform:
    """The backend of this process, loaded on the first call; a process has one.

    Args:
        name: ``"torch"`` or ``"mindspore"``. Without it the choice made before stands, else the environment variable
            ``HYPER_PARALLEL_PLATFORM``, else the one framework that is already imported, else the one that is
            installed; with both installed, PyTorch.

    Raises:
        PlatformError: no framework is installed, an unknown name, a second backend in one process, or a version of
            the framework (or of NumPy beside it) that cannot work.

    Example:
        >>> from hyper_parallel import get_platform
        >>> get_platform().name in ("torch", "mindspore")
        True
    """
    if _registry:
        current = next(iter(_registry.values()))
        if name is not None and name != current.name:
            raise PlatformError(
                f"this process already uses the {current.name!r} backend and cannot change to {name!r}; "
                "start another process for the second one"
            )
        return current
    chosen, reason = _choose(name)
    if chosen not in _BACKENDS:
        raise PlatformError(f"unknown backend {chosen!r} ({reason}); expected one of {_BACKENDS}")
    if importlib.util.find_spec(chosen) is None:
        raise PlatformError(
            f"the {chosen!r} backend was asked for ({reason}) but {chosen} is not installed; "
            f"install it with: {how_to_install(chosen)}"
        )
    module = importlib.import_module(f"hyper_parallel.platform.{chosen}.platform")
    platform: Platform = module.create_platform()
    _registry[chosen] = platform
    return platform


def default_backend() -> Literal["torch", "mindspore"]:
    """What a command uses when nobody says which: as :func:`get_platform` chooses in a new process. Loads nothing.

    Where that is an error, PyTorch, so that the command itself says what is wrong.
    """
    try:
        return "mindspore" if _choose(None)[0] == "mindspore" else "torch"
    except PlatformError:
        return "torch"


def _choose(name: str | None) -> tuple[str, str]:
    if name is not None:
        return name, "by argument"
    variable = os.environ.get(_ENVIRONMENT_VARIABLE)
    if variable:
        return variable, f"by {_ENVIRONMENT_VARIABLE}"
    imported = [b for b in _BACKENDS if b in sys.modules]
    if len(imported) == 1:
        return imported[0], "already imported"
    installed = [b for b in _BACKENDS if importlib.util.find_spec(b) is not None]
    if not installed:
        raise PlatformError(
            f"neither PyTorch nor MindSpore is installed; install PyTorch with: {how_to_install('torch')}; "
            "MindSpore with 'mindspore' in the place of 'torch'"
        )
    return installed[0], "installed"
