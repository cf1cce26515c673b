"""When a job writes checkpoints, and from which one it goes on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from hyper_parallel import __version__
from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import get_platform
from hyper_parallel.tensor_parallel.checkpoint_agreement import agree
from hyper_parallel.trainer.checkpoint_folder import Place, remove_leftovers
from hyper_parallel.trainer.checkpoint_read import read_checkpoint
from hyper_parallel.trainer.checkpoint_start import check_state, checkpoints_of, find_start, is_own, place_of_start
from hyper_parallel.trainer.checkpoint_state import TrainState, describe_options
from hyper_parallel.trainer.checkpoint_tensors import TrainedParts
from hyper_parallel.trainer.checkpoint_write import write_checkpoint
from hyper_parallel.trainer.data import PackedText
from hyper_parallel.trainer.metrics import MetricsLog
from hyper_parallel.trainer.options import TrainOptions

__all__ = ["Checkpointer"]


class Checkpointer:
    """The checkpoints of one job; every method is collective over it, and raises the same on all ranks.

    Args:
        options: the job's.
        parts: model and optimizer.
        text: knows its position (``position``, ``resume``).
    """

    def __init__(self, options: TrainOptions, parts: TrainedParts, text: PackedText) -> None:
        self._options, self._parts, self._text = options, parts, text
        self._settings = options.checkpoint
        self._folder = checkpoints_of(options)
        self._written = -1
        self.continues = False
        """Whether :meth:`resume` went on with the run that is in the output folder, whose metrics are then kept."""

    def resume(self) -> int:
        """Go on from a checkpoint, as the options say; returns the number of steps that were taken before.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged or does not fit the job, or checkpoints of
                another run are in the way.
        """
        path = self._choose()
        if path is None:
            return 0
        state = read_checkpoint(path, self._parts, self._options.seed)
        changes, error = [], None
        try:
            changes = check_state(path, state, self._options, self._text)
        except ValueError as e:
            error = e
        agree(error, [""], "going on from a checkpoint", self._parts.ranks(), self._parts.like())
        if get_platform().rank() == 0:
            print(f"going on after step {state.step} from {path}", flush=True)
            for change in changes:
                print(f"  changed since then: {change}", flush=True)
        self.continues = is_own(path, self._options)
        self._written = state.step if self.continues else -1
        return state.step

    def after_step(self, step: int, stopping: bool, log: MetricsLog) -> None:
        """Write a checkpoint where one is due: after every ``interval`` steps, the last step, and on a stop."""
        settings = self._settings
        due = step % settings.interval == 0 or step == self._options.steps or (stopping and settings.save_on_stop)
        if not settings.enable or not due or step == self._written:
            return
        log.flush()  # a run that goes on from here has the metrics up to here
        write_checkpoint(self._folder, self._state(step), self._parts, settings.keep_latest_k)
        self._written = step

    def _state(self, step: int) -> TrainState:
        platform = get_platform()
        return TrainState(
            step=step,
            updates=self._parts.learner.updates,
            schedule={"kind": "warmup_cosine", "step": step, "steps": self._options.steps}
            | {k: v for k, v in asdict(self._options.optimizer).items() if "lr" in k or "warmup" in k},
            data=self._text.position(step),
            backend=platform.name,
            rng=[],
            options=describe_options(self._options),
            versions={"hyper_parallel": __version__, platform.name: platform.version},
        )

    def _choose(self) -> Path | None:
        """The checkpoint to go on from. The first rank looks, so that all see the same."""
        ranks, found, error = self._parts.ranks(), Place.NOWHERE, None
        try:
            if ranks.rank == 0:
                found = find_start(self._options)
                if self._settings.enable:
                    remove_leftovers(self._folder)
        except OSError as e:
            error = CheckpointError(f"cannot use {e.filename or self._folder}: {e.strerror}")
        except CheckpointError as e:
            error = e
        numbers = agree(error, [""], "finding a checkpoint", ranks, self._parts.like(), found)
        told = (int(numbers[0, 0]), int(numbers[0, 1]))
        return None if told == Place.NOWHERE else place_of_start(self._options).at(told)
