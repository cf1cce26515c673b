"""One worker of a training job: from options to a trained model and its metrics."""

from __future__ import annotations

import zlib

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.data import PackedText
from hyper_parallel.trainer.metrics import MetricsLog
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.stopping import StopRequest
from hyper_parallel.trainer.summary import METRICS_FILE, RunSummary
from hyper_parallel.trainer.text import read_tokens
from hyper_parallel.trainer.trainer import Trainer

__all__ = ["run_worker"]


def run_worker(options: TrainOptions) -> RunSummary:
    """Train as one rank of the job that the environment describes; collective over all of its processes.

    Rank 0 writes ``metrics.jsonl`` (a line per step) and ``summary.json`` into ``options.output``. The process group
    stays open.

    Raises:
        ValueError: options, text and number of processes do not fit together, or ranks disagree on them.
        FileNotFoundError: there is no text.
    """
    platform = get_platform(options.backend)
    degrees = options.parallelism
    shape = (degrees.data_parallel_degree, degrees.tensor_parallel_degree)
    mesh = init_device_mesh(options.device, shape, mesh_dim_names=("dp", "tp"))
    training = options.training
    text = PackedText(read_tokens(options.data), training.sequence_length, training.batch_size, options.seed)
    _check_agreement(mesh, options, text)
    stop = StopRequest()
    with stop.listening():
        trainer = Trainer(options, mesh, text)
        if platform.rank() == 0:
            print(trainer.describe(), flush=True)
        log = MetricsLog(
            options.output / METRICS_FILE,
            options.steps,
            training.log_interval,
            mesh,
            trainer.tools,
            label=f"dp={shape[0]} tp={shape[1]}",
        )
        try:
            result = trainer.train(log, stop)
        finally:
            log.close()
    summary = RunSummary(
        steps=result.steps,
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
    )
    if platform.rank() == 0:
        summary.write(options.output)
    return summary


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
