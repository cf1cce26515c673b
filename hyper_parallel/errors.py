"""Every exception that the library raises on purpose."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "HyperParallelError",
    "LossParallelLayoutError",
    "LossParallelUnsupportedError",
    "ParallelPlanError",
    "PlatformError",
    "UnsupportedOperatorError",
]


def how_to_install(extra: str) -> str:
    """The remedy for a package that is not installed, for messages: right for a checkout, too."""
    return f"pip install 'hyper_parallel[{extra}]' (in a checkout: pip install -c constraints.txt '.[{extra}]')"


class HyperParallelError(Exception):
    """Base class, for callers who want to catch whatever this library raises."""


class PlatformError(HyperParallelError, RuntimeError):
    """No usable backend, a second backend in one process, or an incompatible version of one."""


class UnsupportedOperatorError(HyperParallelError, NotImplementedError):
    """An operator, or this combination of layouts, has no distributed rule.

    The message names the operator, the layouts found, and how to register a rule.
    """


class LossParallelLayoutError(HyperParallelError, ValueError):
    """The logits, target or weight of a cross-entropy do not have the layout that loss parallel needs.

    The message names the layout found and the one expected.
    """


class LossParallelUnsupportedError(HyperParallelError, NotImplementedError):
    """A cross-entropy option that loss parallel refuses: label smoothing, probability targets."""


class ParallelPlanError(HyperParallelError, ValueError):
    """A plan, style or shard loader does not fit the model or the number of ranks.

    Raised on every rank, before any parameter is changed. The message names what was found and what was expected.
    """


class CheckpointError(HyperParallelError, ValueError):
    """A checkpoint cannot be read or written: files that are missing, damaged or lie, keys that do not fit the model.

    Raised with the same message on every rank, before anybody waits in a collective for somebody who has given up.
    """
