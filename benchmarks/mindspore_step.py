"""A whole training step of the example Llama on MindSpore: class-sharded logits, and logits gathered on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from benchmarks.memory import peak_extra_bytes
from benchmarks.mindspore_loss import barrier
from benchmarks.step_model import step_model
from benchmarks.timing import Clock, interleave
from hyper_parallel import ParallelismConfig, init_device_mesh, loss_parallel, parallelize_module
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.llama.mindspore import LlamaForCausalLM

__all__ = ["run"]

_OURS = "ours, loss parallel"


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a way: seconds, peak memory, the loss of the first step (the same for all)."""
    size = int(os.environ["WORLD_SIZE"])
    config = step_model(options["quick"])
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    tokens = np.random.default_rng(3).integers(config.vocab_size, size=(2, 129)).astype(np.int32)
    rows: list[dict[str, Any]] = []
    for sequence in (False, True):
        steps = {
            _OURS: _step(_model(config, mesh, sequence, gathered=False), tokens),
            "ours, logits gathered": _step(_model(config, mesh, sequence, gathered=True), tokens),
        }
        losses = {name: step() for name, step in steps.items()}
        peaks = {name: peak_extra_bytes(step) for name, step in steps.items()}
        ways = {name: partial(_timed, step) for name, step in steps.items()}
        times = interleave(ways, 3 if options["quick"] else 7, barrier(mesh.get_group()))
        for name in steps:
            rows.append(
                {
                    "model": name,
                    "sequence parallel": "yes" if sequence else "no",
                    "step ms": round(1e3 * times[name]["seconds"], 1),
                    "times ours": round(times[name]["seconds"] / times[_OURS]["seconds"], 2),
                    "peak extra MiB": round((peaks[name] or 0) / 2**20, 1),
                    "first loss": round(losses[name], 5),
                }
            )
    return rows


def _model(config: LlamaConfig, mesh: Any, sequence: bool, gathered: bool) -> Any:
    model = LlamaForCausalLM(config)
    rng = np.random.default_rng(0)
    for parameter in model.get_parameters():
        if parameter.ndim > 1:
            parameter.set_data(Tensor((0.02 * rng.standard_normal(parameter.shape)).astype(np.float32)))
    return parallelize_module(
        model, mesh["tp"], config=ParallelismConfig(disable_loss_parallel=gathered), sequence_parallel=sequence
    )


def _step(model: Any, tokens: np.ndarray[Any, Any]) -> Callable[[], float]:
    inputs, labels = Tensor(tokens[:, :-1]), Tensor(tokens[:, 1:].reshape(-1))
    parameters = list(model.trainable_params())

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs)
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels)

    with_gradients = mindspore.value_and_grad(loss, None, parameters)

    def step() -> float:
        with loss_parallel():
            value, gradients = with_gradients(inputs, labels)
        for parameter, gradient in zip(parameters, gradients):
            parameter.assign_value(parameter - 1e-3 * gradient)
        return float(value.asnumpy())

    return step


def _timed(step: Callable[[], float]) -> dict[str, float]:
    clock = Clock()
    step()
    return {"seconds": clock.lap()}
