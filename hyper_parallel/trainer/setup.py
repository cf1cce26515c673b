"""From options to a model that is shared between the ranks and has its initial weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.models.llama import build_llama
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.modules import get_module_backend
from hyper_parallel.platform.training import TrainingTools
from hyper_parallel.tensor_parallel.auto_plan import last_layer
from hyper_parallel.tensor_parallel.initialize import Constant, Initializer, Normal
from hyper_parallel.tensor_parallel.materialize import materialize
from hyper_parallel.tensor_parallel.plan import parallelize_module
from hyper_parallel.trainer.options import TrainOptions

__all__ = ["BuiltModel", "build_model"]


@dataclass(frozen=True)
class BuiltModel:
    """A model and its size.

    Attributes:
        model: the backend's module; its parameters are what this rank holds.
        parameters: numbers in the whole model.
        local_parameters: numbers that this rank holds.
    """

    model: Any
    parameters: int
    local_parameters: int


def build_model(options: TrainOptions, mesh: DeviceMesh, tools: TrainingTools) -> BuiltModel:
    """Build without memory, share, materialise: no rank ever holds more than its part. Collective over the job.

    The initial weights depend on the seed alone, not on the number of ranks.

    Args:
        options: the model, the plan and the seed.
        mesh: 2-D with dims ``("dp", "tp")``.
        tools: the backend's.
    """
    config = options.parallelism
    model = tools.build(lambda: build_llama(options.model))
    parameters = _count(model)
    if config.tp_enabled:
        plan: Any = "auto" if options.plan == "auto" else {"lm_head": last_layer(config)}
        parallelize_module(model, mesh["tp"], plan, config=config)
    initial: dict[str, Initializer] = {"*": Normal(options.model.initializer_range), "*norm.weight": Constant(1.0)}
    materialize(model, seed=options.seed, initial=initial, device=options.device)
    return BuiltModel(model, parameters, _count(model))


def _count(model: Any) -> int:
    backend, platform = get_module_backend(), get_platform()
    modules = [module for _, module in backend.named_modules(model)]
    found = {id(p): platform.shape(p) for module in modules for p in backend.own_parameters(module).values()}
    return sum(math.prod(shape) for shape in found.values())
