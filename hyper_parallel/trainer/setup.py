"""From options to a model that is shared between the ranks and has its initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.loss_parallel import TrainContext
from hyper_parallel.models.llama import build_llama
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.training import ModelSettings, TrainingTools
from hyper_parallel.tensor_parallel.auto_plan import last_layer
from hyper_parallel.tensor_parallel.data_shards import local_part
from hyper_parallel.tensor_parallel.hf_load import load_hf_checkpoint
from hyper_parallel.tensor_parallel.initialize import Constant, Initializer, Normal
from hyper_parallel.tensor_parallel.materialize import materialize
from hyper_parallel.tensor_parallel.plan import parallelize_module
from hyper_parallel.tensor_parallel.styles import ParallelStyle
from hyper_parallel.trainer.linear_loss import LinearCrossEntropyLoss
from hyper_parallel.trainer.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss, HeadLoss, LossFunction
from hyper_parallel.trainer.options import TrainOptions

__all__ = ["BuiltModel", "ModelSource", "Plan", "build_model", "count_parameters", "make_loss", "model_settings"]

ModelSource = Callable[[], Module]
"""Builds the model, as it would for one device. Runs where tensors have shapes but no memory."""

Plan = str | Mapping[str, "str | ParallelStyle"]
"""What :func:`parallelize_module` takes."""


@dataclass(frozen=True)
class BuiltModel:
    """A model and its size.

    Attributes:
        model: the backend's module; its parameters are what this rank holds.
        parameters: numbers in the whole model.
    """

    model: Module
    parameters: int


def build_model(
    options: TrainOptions,
    mesh: DeviceMesh,
    tools: TrainingTools,
    source: ModelSource | None = None,
    plan: Plan | None = None,
    weights: Path | None = None,
) -> BuiltModel:
    """Build without memory, share, materialise or load: no rank ever holds more than its part. Collective over the job.

    The initial weights depend on the seed alone, not on the number of ranks.

    Args:
        options: the model, the plan and the seed.
        mesh: 2-D with dims ``("dp", "tp")``.
        tools: the backend's.
        source: builds another model, whose own code says how it is initialised.
        plan: what the ranks of a tp group share of it, in the place of ``options.plan``.
        weights: a Hugging Face folder to load; None: first values are drawn.
    """
    config = options.parallelism
    model = tools.build(source or (lambda: build_llama(options.model)))
    parameters = count_parameters(model)
    if config.tp_enabled:
        whole: Plan = "auto" if options.plan == "auto" else {"lm_head": last_layer(config)}
        parallelize_module(
            model, mesh["tp"], plan or whole, config=config, sequence_parallel=config.enable_sequence_parallel
        )
    if weights is not None:
        load_hf_checkpoint(model, weights, device=options.device)
        return BuiltModel(model, parameters)
    llama: dict[str, Initializer] = {"*": Normal(options.model.initializer_range), "*norm.weight": Constant(1.0)}
    materialize(model, seed=options.seed, initial=llama if source is None else None, device=options.device)
    return BuiltModel(model, parameters)


def model_settings(options: TrainOptions, mesh: DeviceMesh) -> ModelSettings:
    """How the framework shall run the model."""
    training, parallelism = options.training, options.parallelism
    return ModelSettings(
        data_mesh=mesh["dp"],
        data_parallel=parallelism.data_parallel,
        compute_dtype=training.mixed_precision_param,
        activation_checkpoint=training.activation_checkpoint,
        compile=training.compile,
        compile_backend=training.compile_backend,
    )


def make_loss(
    options: TrainOptions, model: Module, context: TrainContext, own: LossFunction | None = None
) -> LossFunction | HeadLoss:
    """The loss that the options name, put in the place of the model's last layer where it has to be.

    Raises:
        ValueError: a loss of one's own beside an option that names one, or a model without a known last layer.
    """
    training = options.training
    if own is not None:
        if training.loss != "cross_entropy":
            raise ValueError(f"a loss was given, and training.loss is {training.loss!r}; leave one of them out")
        return own
    if training.loss == "cross_entropy":
        return CrossEntropyLoss()
    loss: HeadLoss = LinearCrossEntropyLoss()
    if training.loss == "chunked":
        loss = ChunkedCrossEntropyLoss(training.loss_chunks, context)
    loss.attach(model)
    return loss


def count_parameters(model: Module) -> int:
    """Numbers in the parameters that this rank holds; of those that FSDP2 has sharded its own part."""
    backend, platform = get_module_backend(), get_platform()
    modules = [module for _, module in backend.named_modules(model)]
    parameters = {id(p): p for module in modules for p in backend.own_parameters(module).values()}
    return sum(math.prod(platform.shape(local_part(p))) for p in parameters.values())
