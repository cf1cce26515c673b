"""The training loop, top to bottom. Knows no framework."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.loss_parallel import get_train_context
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
from hyper_parallel.trainer.data import Batch, PackedText
from hyper_parallel.trainer.data_prefetch import prefetch
from hyper_parallel.trainer.loss import LossFunction, loss_of_model
from hyper_parallel.trainer.metrics import MetricsLog, StepRecord
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.same_batch import check_same_batch
from hyper_parallel.trainer.schedule import warmup_cosine
from hyper_parallel.trainer.setup import ModelSource, Plan, build_model, count_parameters, make_loss, model_settings
from hyper_parallel.trainer.stopping import StopRequest
from hyper_parallel.trainer.validator import Validator

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
    """One job: a Llama or a model of your own, AdamW, and text, on a dp x tp mesh.

    Building one is collective over the mesh. The ranks of a tp group share the layers and the classes; the loss
    is class-sharded cross-entropy, summed and divided by the number of valid tokens of the whole batch.

    Args:
        options: what to train, and how.
        mesh: 2-D with dims ``("dp", "tp")``.
        text: the same on all ranks.
        model: builds another model than the Llama of ``options.model``, as for one device. Called with token ids
            ``[batch, length]`` it gives logits ``[batch, length, classes]``, or an object with ``logits``.
        plan: what the ranks of a tp group share of it, as :func:`parallelize_module` takes it.
        loss: another loss, from logits.
        held_out: text for :attr:`validator`; None: there is none.

    Raises:
        ValueError: options, mesh and text do not fit together.
    """

    def __init__(
        self,
        options: TrainOptions,
        mesh: DeviceMesh,
        text: PackedText,
        *,
        model: ModelSource | None = None,
        plan: Plan | None = None,
        loss: LossFunction | None = None,
        held_out: PackedText | None = None,
    ) -> None:
        self.options, self.mesh, self.text = options, mesh, text
        self.platform, self.tools = get_platform(), load_training_tools()
        self.tools.seed(options.seed, options.device)
        config, optimizer = options.parallelism, options.optimizer
        self.built = build_model(options, mesh, self.tools, model, plan)
        self.model = self.built.model
        self.train_context = get_train_context(config.loss_parallel_enabled, config)
        self.loss = make_loss(options, self.model, self.train_context, loss)
        self.learner = self.tools.learner(
            self.model,
            {"betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay},
            model_settings(options, mesh),
        )
        self.validator = None
        if held_out is not None:
            self.validator = Validator(
                self.learner.model, self.loss, self.train_context, held_out, mesh, max_batches=options.validation.steps
            )

    def describe(self) -> str:
        """One line on what is trained, and how it is shared."""
        state = "on" if self.options.parallelism.loss_parallel_enabled else "off"
        return (
            f"{len(self.text.tokens):,} tokens of text, {self.mesh.describe()}, loss parallel {state}, "
            f"{self.built.parameters:,} parameters: {count_parameters(self.model):,} on a rank"
        )

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
        with prefetch(self._batch, start, self.options.steps, self.options.text.prefetch) as batches:
            for step, batch in batches:
                if step == start:
                    check_same_batch(batch, self.mesh)
                log.record(self._step(step, batch))
                self._validate(step + 1, log)
                stopping = stop.agreed(self.mesh)
                if after_step is not None:
                    after_step(step + 1, stopping)
                if stopping:
                    log.flush()
                    return TrainResult(step + 1, interrupted=True)
        log.flush()
        return TrainResult(self.options.steps, interrupted=False)

    def _validate(self, step: int, log: MetricsLog) -> None:
        freq = self.options.validation.freq
        if self.validator is not None and freq and (step % freq == 0 or step == self.options.steps):
            log.flush()
            began = time.perf_counter()
            log.validated(step, self.validator.run(), time.perf_counter() - began)

    def _batch(self, step: int) -> Batch:
        return self.text.batch(step, self.mesh.get_local_rank("dp"), self.mesh.size("dp"))

    def _step(self, step: int, batch: Batch) -> StepRecord:
        training, optimizer = self.options.training, self.options.optimizer
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
        return StepRecord(step + 1, loss, norm, lr, batch.tokens.size * self.mesh.size("dp"))

    def _accumulate(self, batch: Batch, valid: int) -> Tensor:
        """Gradients of the batch's loss over this rank's rows; returns the loss over all rows."""
        rows = len(batch.tokens) // self.options.training.gradient_accumulation
        total = None
        for first in range(0, len(batch.tokens), rows):
            tokens, labels, *positions = (
                self.tools.to_device(a, self.options.device) for a in batch.rows(first, first + rows) if a is not None
            )
            self.learner.announce_part(last=first + rows >= len(batch.tokens))
            with self.train_context():
                part = self.learner.accumulate(partial(self._loss, positions, valid), tokens, labels)
            total = part if total is None else total + part
        return self._all_reduce(total, "dp")

    def _loss(self, positions: list[Tensor], valid: int, tokens: Tensor, labels: Tensor) -> Tensor:
        """Sum over the rows at hand, divided by the whole batch's valid tokens: parts add up to the mean."""
        return loss_of_model(self.learner.model, self.loss, (tokens, *positions), labels, valid)

    def _reduce_and_clip(self, max_norm: float | None) -> Tensor:
        """Add up what data-parallel ranks found; returns the norm over all parameters, before clipping."""
        if self.mesh.size("dp") > 1 and not self.learner.sums_over_data:
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
