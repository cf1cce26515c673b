"""What a checkpoint knows beside tensors: how far the job was, and under which options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.trainer.checkpoint_manifest import read_small_json
from hyper_parallel.trainer.options import TrainOptions

__all__ = ["STATE_FILE", "TrainState", "describe_options", "option_changes"]

STATE_FILE = "state.json"

_FREE = ("output", "checkpoint")
"""Options that may change from one part of a run to the next without a word: where it writes, and how often."""


@dataclass(frozen=True)
class TrainState:
    """The content of ``state.json``.

    Attributes:
        step: optimizer steps taken.
        updates: what the optimizer has counted; not the same where steps were left out.
        schedule: of the learning rate; for the reader, as the options determine it.
        data: what the data says of its position.
        backend: whose generators the random states belong to.
        rng: for each rank, the state of each generator.
        options: those of the run.
        versions: of this library and the framework.
    """

    step: int
    updates: int
    schedule: Mapping[str, Any]
    data: Mapping[str, Any]
    backend: str
    rng: Sequence[Mapping[str, str]]
    options: Mapping[str, Any]
    versions: Mapping[str, str]

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> TrainState:
        """From the folder of a checkpoint.

        Raises:
            CheckpointError: the file is not there, or not what it should be.
        """
        content = read_small_json(folder / STATE_FILE)
        try:
            state = cls(**content)
        except TypeError as error:
            raise CheckpointError(f"{folder / STATE_FILE} is no training state: {error}") from None
        kinds = {
            "step": int, "updates": int, "schedule": dict, "data": dict, "backend": str, "rng": list,
            "options": dict, "versions": dict,
        }  # fmt: skip
        for name, kind in kinds.items():
            if not isinstance(getattr(state, name), kind):
                raise CheckpointError(
                    f"{folder / STATE_FILE}: {name} is {getattr(state, name)!r:.100}; expected {kind.__name__}"
                )
        return state


def describe_options(options: TrainOptions) -> dict[str, Any]:
    """As plain JSON values."""
    content: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return content


def option_changes(before: Mapping[str, Any], options: TrainOptions) -> list[str]:
    """Options that differ from those of a checkpoint, in words; those that say where it writes left out.

    Raises:
        CheckpointError: the model is another one.
    """
    old, new = dict(_flatten(before)), dict(_flatten(describe_options(options)))
    changes = [
        f"{name} {old[name]!r} -> {new[name]!r}"
        for name in old
        if name in new and old[name] != new[name] and name.split(".")[0] not in _FREE
    ]
    model = [c for c in changes if c.startswith("model.") and not c.startswith("model.initializer_range")]
    if model:
        raise CheckpointError(f"the checkpoint holds another model: {', '.join(model)}")
    return changes


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
