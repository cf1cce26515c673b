"""One worker of a training job: from options to a trained model and its metrics."""

from __future__ import annotations

import zlib
from functools import partial

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.checkpoint import Checkpointer
from hyper_parallel.trainer.checkpoint_tensors import TrainedParts
from hyper_parallel.trainer.completed import completed_run, describe_completed
from hyper_parallel.trainer.data import PackedText
from hyper_parallel.trainer.loss import LossFunction
from hyper_parallel.trainer.metrics import MetricsLog
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.setup import ModelSource, Plan
from hyper_parallel.trainer.stopping import StopRequest
from hyper_parallel.trainer.summary import METRICS_FILE, TENSORBOARD_FOLDER, RunSummary
from hyper_parallel.trainer.trainer import Trainer
from hyper_parallel.trainer.validation_text import open_texts

__all__ = ["run_worker"]


def run_worker(
    options: TrainOptions,
    *,
    model: ModelSource | None = None,
    plan: Plan | None = None,
    loss: LossFunction | None = None,
) -> RunSummary:
    """Train as one rank of the job that the environment describes; collective over all of its processes.

    Rank 0 writes ``metrics.jsonl`` (a line per step) and ``summary.json`` into ``options.output``. The process group
    stays open. A job that goes on from the checkpoint of its last step says so, changes nothing, and returns the
    summary that is there.

    Args:
        options: what to train, and how.
        model: builds another model; see :class:`Trainer`.
        plan: what tensor-parallel ranks share of it.
        loss: another loss.

    Raises:
        ValueError: options, text and number of processes do not fit together, or ranks disagree on them.
        FileNotFoundError: there is no text.
        CheckpointError: a checkpoint to go on from is damaged, or of a job with other options.
    """
    platform = get_platform(options.backend)
    degrees = options.parallelism
    shape = (degrees.data_parallel_degree, degrees.tensor_parallel_degree)
    mesh = init_device_mesh(options.device, shape, mesh_dim_names=("dp", "tp"))
    if (done := _completed(mesh, options)) is not None:
        return done
    training = options.training
    text, held_out = open_texts(options)
    _check_agreement(mesh, options, text)
    stop = StopRequest()
    with stop.listening():
        trainer = Trainer(options, mesh, text, model=model, plan=plan, loss=loss, held_out=held_out)
        if platform.rank() == 0:
            print(trainer.describe(), flush=True)
        parts = TrainedParts(trainer.built.model, trainer.learner, trainer.tools, options.device)
        checkpoints = Checkpointer(options, parts, text)
        start = checkpoints.resume()
        if start >= options.steps and not checkpoints.continues:
            raise ValueError(
                f"nothing to train: the checkpoint is of step {start} of {options.steps}; raise steps to go on from it"
            )
        metrics = options.output / METRICS_FILE
        if platform.rank() == 0 and not checkpoints.continues and metrics.exists():
            print(f"{metrics} of an earlier run is replaced; another --output would keep it", flush=True)
        log = MetricsLog(
            metrics,
            options.steps,
            training.log_interval,
            mesh,
            trainer.tools,
            label=f"dp={shape[0]} tp={shape[1]}",
            start=start,
            keep=start if checkpoints.continues else 0,
            tensorboard=options.output / TENSORBOARD_FOLDER if options.metrics.enable_tensorboard else None,
        )
        try:
            result = trainer.train(log, stop, start=start, after_step=partial(checkpoints.after_step, log=log))
        finally:
            log.close()
        if not log.last:
            raise ValueError(
                f"nothing to train: the checkpoint is of step {start} of {options.steps}; raise steps to go on from it"
            )
    summary = RunSummary(
        steps=result.steps,
        start=start,
        interrupted=result.interrupted,
        first_loss=log.first["loss"],
        last_loss=log.last["loss"],
        seconds=round(log.seconds, 3),
        tokens_per_second=round(log.tokens_per_second, 1),
        peak_memory_bytes=log.peak_memory,
        parameters=trainer.built.parameters,
        backend=platform.name,
        version=platform.version,
        data_parallel_degree=shape[0],
        tensor_parallel_degree=shape[1],
        validation_loss=log.validation.get("validation_loss"),
    )
    if platform.rank() == 0:
        summary.write(options.output)
    return summary


def _completed(mesh: DeviceMesh, options: TrainOptions) -> RunSummary | None:
    """The summary of a job that has nothing left to do, when all ranks see that; an error on any is one on all."""
    platform = get_platform()
    found, error = None, None
    try:
        found = completed_run(options)
    except (OSError, ValueError) as e:
        error = e
    seen = platform.from_numpy(np.array([found is not None, error is not None], np.int64))
    for dim in range(mesh.ndim):
        seen = platform.all_gather(seen, mesh.get_group(dim))
    complete, failed = platform.to_numpy(seen).reshape(-1, 2).T
    if failed.any():
        raise error or ValueError("a complete run was found, and another rank has options that do not fit it")
    if not complete.all():
        return None
    if platform.rank() == 0:
        print(describe_completed(options), flush=True)
    return found


def _check_agreement(mesh: DeviceMesh, options: TrainOptions, text: PackedText) -> None:
    """The same error on all ranks when one of them has other options or another text."""
    platform = get_platform()
    own = np.array([zlib.crc32(repr(options).encode()), text.fingerprint], np.int64)
    seen = platform.from_numpy(own)
    for dim in range(mesh.ndim):
        seen = platform.all_gather(seen, mesh.get_group(dim))
    table = platform.to_numpy(seen).reshape(-1, 2)
    for column, what in enumerate(("options", "text")):
        values = table[:, column].tolist()
        if len(set(values)) > 1:
            raise ValueError(f"ranks differ in their {what}: checksums {values}; all must start with the same")
