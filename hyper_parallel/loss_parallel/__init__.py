"""Vocabulary-parallel cross-entropy.

The name ``hyper_parallel.loss_parallel`` is both this package and the context manager: the package can be called, so
every import form gives what its reader expects.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from hyper_parallel.core import dtensor as _dtensor
from hyper_parallel.errors import LossParallelLayoutError, LossParallelUnsupportedError
from hyper_parallel.loss_parallel.context import (
    TrainContext,
    get_train_context,
    is_loss_parallel_active,
    loss_parallel,
)
from hyper_parallel.loss_parallel.dispatch import dispatch_loss_parallel
from hyper_parallel.loss_parallel.op_names import LOSS_PARALLEL_OP_NAMES, register_loss_parallel_op_names

__all__ = [
    "LOSS_PARALLEL_OP_NAMES",
    "LossParallelLayoutError",
    "LossParallelUnsupportedError",
    "TrainContext",
    "get_train_context",
    "is_loss_parallel_active",
    "loss_parallel",
    "register_loss_parallel_op_names",
]

_dtensor.dispatcher.loss_handler = dispatch_loss_parallel
_dtensor.dispatcher.loss_op_names = LOSS_PARALLEL_OP_NAMES


class _CallableModule(ModuleType):
    """``hyper_parallel.loss_parallel(...)`` is the context manager."""

    __wrapped__ = staticmethod(loss_parallel)

    def __call__(self, mesh: Any = None, strict: bool | None = None) -> Any:
        return loss_parallel(mesh, strict)


sys.modules[__name__].__class__ = _CallableModule
