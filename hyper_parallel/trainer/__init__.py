"""Training jobs: options, data, the loop, local workers.

Importing this package loads no framework; the names below are fetched when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "ChunkedCrossEntropyLoss": "loss",
    "CrossEntropyLoss": "loss",
    "CheckpointOptions": "checkpoint_options",
    "MetricsOptions": "metrics_options",
    "OptimizerOptions": "options",
    "PackedText": "data",
    "RunSummary": "summary",
    "TextOptions": "data_options",
    "TrainOptions": "options",
    "Trainer": "trainer",
    "TrainingOptions": "options",
    "ValidationOptions": "options",
    "Validator": "validator",
    "run_worker": "job",
}

__all__ = sorted([*_EXPORTS, "train"])

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import run_worker as run_worker

    train = run_worker


def __getattr__(name: str) -> Any:
    source = "run_worker" if name == "train" else name
    if source not in _EXPORTS:
        raise AttributeError(f"module 'hyper_parallel.trainer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hyper_parallel.trainer.{_EXPORTS[source]}"), source)
    globals()[name] = value
    return value
