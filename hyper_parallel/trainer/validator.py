"""The loss on text that is not trained on, over all ranks, each token once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.loss_parallel import TrainContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import Module
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.trainer.data import IGNORE_INDEX, Batch, PackedText
from hyper_parallel.trainer.loss import HeadLoss, LossFunction, loss_of_model
from hyper_parallel.trainer.validation import Validation

__all__ = ["Validator"]


class Validator:
    """Runs a model over a text.

    The windows of the text are dealt out to the data-parallel ranks, each once; the last batch is filled up with
    windows that have no labels, so that all ranks call the model equally often.

    Args:
        model: what training calls.
        loss: what training minimises.
        validation_context: the train context; training and validation share it.
        text: the same on all ranks; its ``batch_size`` is that of all data-parallel ranks together.
        mesh: 2-D with dims ``("dp", "tp")``.
        max_batches: of a run; 0: as many as the text has.
    """

    def __init__(
        self,
        model: Module,
        loss: LossFunction | HeadLoss,
        validation_context: TrainContext,
        text: PackedText,
        mesh: DeviceMesh,
        *,
        max_batches: int = 0,
    ) -> None:
        self.model, self.loss, self.validation_context = model, loss, validation_context
        self.text, self.mesh = text, mesh
        batches = -(-text.windows // text.batch_size)
        self.batches = min(batches, max_batches) if max_batches else batches

    def run(self, after_batch: Callable[[], object] | None = None) -> Validation:
        """The mean loss. Collective over the mesh.

        Args:
            after_batch: called after each, on each rank.

        Raises:
            ValueError: no token of the text has a label.
        """
        platform, tools = get_platform(), load_training_tools()
        losses, tokens = 0.0, 0
        with tools.evaluating(self.model):
            for index in range(self.batches):
                batch = self._batch(index)
                losses += float(platform.to_numpy(self._sum(batch)))
                tokens += batch.valid_tokens
                if after_batch is not None:
                    after_batch()
        total = platform.all_reduce(self._on_device(np.array([losses], np.float32)), "sum", self.mesh.get_group("dp"))
        count = platform.all_reduce(self._on_device(np.array([tokens], np.int64)), "sum", self.mesh.get_group("dp"))
        found = int(platform.to_numpy(count)[0])
        if not found:
            raise ValueError("no token of the validation text has a label")
        return Validation(float(platform.to_numpy(total)[0]) / found, found)

    def _sum(self, batch: Batch) -> Tensor:
        inputs = [self._on_device(a) for a in (batch.tokens, batch.position_ids) if a is not None]
        with self.validation_context():
            return loss_of_model(self.model, self.loss, inputs, self._on_device(batch.labels), 1)

    def _batch(self, index: int) -> Batch:
        """This rank's rows of a batch; rows behind the end of the text are others without labels."""
        rows = self.text.batch_size // self.mesh.size("dp")
        first = index * self.text.batch_size + self.mesh.get_local_rank("dp") * rows
        wanted = np.arange(first, first + rows)
        batch = self.text.windows_at(np.minimum(wanted, self.text.windows - 1))
        batch.labels[wanted >= self.text.windows] = IGNORE_INDEX
        return batch

    def _on_device(self, array: np.ndarray) -> Tensor:
        return load_training_tools().to_device(array, self.mesh.device_type)
