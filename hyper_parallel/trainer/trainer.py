"""The training loop, top to bottom. Knows no framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.loss_parallel import get_train_context
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
from hyper_parallel.trainer.data import IGNORE_INDEX, Batch, PackedText
from hyper_parallel.trainer.metrics import MetricsLog, StepRecord
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.schedule import warmup_cosine
from hyper_parallel.trainer.setup import build_model
from hyper_parallel.trainer.stopping import StopRequest

__all__ = ["TrainResult", "Trainer"]

AfterStep = Callable[[int, bool], None]
"""Given the number of steps taken, and whether somebody has asked to stop."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        steps: optimizer steps taken.
        interrupted: whether somebody asked to stop before the last one.
    """

    steps: int
    interrupted: bool


class Trainer:
    """One job: a Llama, AdamW, and text, on a dp x tp mesh.

    Building one is collective over the mesh. The ranks of a tp group share the layers and the classes; the loss
    is class-sharded cross-entropy, summed and divided by the number of valid tokens of the whole batch.

    Args:
        options: what to train, and how.
        mesh: 2-D with dims ``("dp", "tp")``.
        text: the same on all ranks.

    Raises:
        ValueError: options, mesh and text do not fit together.
    """

    def __init__(self, options: TrainOptions, mesh: DeviceMesh, text: PackedText) -> None:
        self.options, self.mesh, self.text = options, mesh, text
        self.platform, self.tools = get_platform(), load_training_tools()
        self.tools.seed(options.seed, options.device)
        self._check()
        self.built = build_model(options, mesh, self.tools)
        self.model = self.built.model
        optimizer = options.optimizer
        self.learner = self.tools.learner(
            self.model,
            {"betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay},
        )
        config = options.parallelism
        self.train_context = get_train_context(config.loss_parallel_enabled, config)

    def describe(self) -> str:
        """One line on what is trained, and how it is shared."""
        state = "on" if self.options.parallelism.loss_parallel_enabled else "off"
        return (
            f"{len(self.text.tokens):,} tokens of text, {self.mesh.describe()}, loss parallel {state}, "
            f"{self.built.parameters:,} parameters: {self.built.local_parameters:,} on a rank"
        )

    def _check(self) -> None:
        rows = self.options.training.batch_size
        parts = self.options.parallelism.data_parallel_degree * self.options.training.gradient_accumulation
        if rows % parts:
            raise ValueError(
                f"batch_size ({rows}) must be a multiple of data_parallel_degree "
                f"({self.options.parallelism.data_parallel_degree}) * gradient_accumulation "
                f"({self.options.training.gradient_accumulation}) = {parts}"
            )
        highest = int(self.text.tokens.max())
        if highest >= self.options.model.vocab_size:
            raise ValueError(f"the text has token id {highest}, but vocab_size is {self.options.model.vocab_size}")

    def train(
        self, log: MetricsLog, stop: StopRequest, *, start: int = 0, after_step: AfterStep | None = None
    ) -> TrainResult:
        """Run all steps, or until every rank knows that one of them was asked to stop.

        Args:
            log: takes note of every step.
            stop: asked after every step.
            start: steps that were taken before.
            after_step: called on all ranks with the number of steps taken, and whether the run stops early.
        """
        training, optimizer = self.options.training, self.options.optimizer
        for step in range(start, self.options.steps):
            batch = self.text.batch(step, self.mesh.get_local_rank("dp"), self.mesh.size("dp"))
            valid = self._over_ranks(batch.valid_tokens, "dp")
            loss = self._accumulate(batch, valid)
            norm = self._reduce_and_clip(training.max_grad_norm)
            lr = warmup_cosine(
                step,
                peak=optimizer.lr,
                warmup_steps=optimizer.warmup_steps,
                total_steps=self.options.steps,
                final_ratio=optimizer.final_lr_ratio,
            )
            self.learner.update(lr)
            log.record(StepRecord(step + 1, loss, norm, lr, batch.tokens.size * self.mesh.size("dp")))
            stopping = stop.agreed(self.mesh)
            if after_step is not None:
                after_step(step + 1, stopping)
            if stopping:
                log.flush()
                return TrainResult(step + 1, interrupted=True)
        log.flush()
        return TrainResult(self.options.steps, interrupted=False)

    def _accumulate(self, batch: Batch, valid: int) -> Tensor:
        """Gradients of the batch's loss over this rank's rows; returns the loss over all rows."""
        rows = len(batch.tokens) // self.options.training.gradient_accumulation
        total = None
        for first in range(0, len(batch.tokens), rows):
            tokens, labels = (self.tools.to_device(a[first : first + rows], self.options.device) for a in batch)
            with self.train_context():
                part = self.learner.accumulate(lambda t, y: self._loss(t, y, valid), tokens, labels)
            total = part if total is None else total + part
        return self._all_reduce(total, "dp")

    def _loss(self, tokens: Tensor, labels: Tensor, valid: int) -> Tensor:
        """Sum over the rows at hand, divided by the whole batch's valid tokens: parts add up to the mean."""
        loss = self.tools.cross_entropy_sum(self.model(tokens), labels, IGNORE_INDEX) / max(valid, 1)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _reduce_and_clip(self, max_norm: float | None) -> Tensor:
        """Add up what data-parallel ranks found; returns the norm over all parameters, before clipping."""
        if self.mesh.size("dp") > 1:
            self.learner.map_gradients(lambda flat: self._all_reduce(flat, "dp"))
        limit = math.inf if max_norm is None else max_norm
        return clip_grad_norm_(self.learner.parameters, limit, gradients=self.learner.gradients())

    def _all_reduce(self, x: Tensor, mesh_dim: str) -> Tensor:
        return self.platform.all_reduce(x, "sum", self.mesh.get_group(mesh_dim))

    def _over_ranks(self, value: int, mesh_dim: str) -> int:
        if self.mesh.size(mesh_dim) == 1:
            return value
        tensor = self.tools.to_device(np.array([value], np.int64), self.options.device)
        return int(self.platform.to_numpy(self._all_reduce(tensor, mesh_dim))[0])
