"""Build without memory, parallelise, materialise: the first values of a model that is not loaded from a file.

Distributions are those of the model's own code; the numbers come from :mod:`.initialize`, so that they depend on the
seed and the parameters' names alone: bit-identical whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.weights import BufferPlan, Draw, get_weight_backend
from hyper_parallel.tensor_parallel.checkpoint_agreement import agree
from hyper_parallel.tensor_parallel.groups import resolve_group
from hyper_parallel.tensor_parallel.initialize import Constant, Initializer, Normal, Uniform, draw_shard
from hyper_parallel.tensor_parallel.layers import SharedLayer
from hyper_parallel.tensor_parallel.model_tensors import (
    ModelTensor,
    common_group,
    every_rank,
    model_tensors,
    whereabouts,
)

__all__ = ["materialize"]

_WHAT = "materialize"


def materialize(
    model: Module,
    *,
    seed: int = 0,
    initial: Mapping[str, Initializer] | None = None,
    device: str | None = None,
    group: Any = None,
) -> Module:
    """Give memory and first values to all of a model that has none; what has memory keeps its values.

    Each parameter is drawn as the model's own code says (``_init_weights`` or ``reset_parameters``, run on tensors
    without memory), with the fan and the standard deviation of the whole parameter, and each rank draws only its own
    part. Tied parameters stay one. Buffers that are not part of checkpoints, such as rotary frequencies, are computed.

    Args:
        model: built on the meta device, then parallelised (or whole).
        seed: 0 or more, the same on all ranks.
        initial: patterns of parameter names -> their distribution, in the place of what the model's code says.
        device: where memory is allocated; None: where the model's mesh is.
        group: the ranks that call; None: all of the job.

    Returns:
        ``model``, changed in place: holders of its parameters (optimizers) must be made afterwards.

    Collectives: two small all-gathers.

    Raises:
        CheckpointError: the same on every rank, before memory is touched: parameters or buffers that would be left
            without values (naming them), ranks with different models or seeds.

    Example:
        >>> with torch.device("meta"):                                                       # doctest: +SKIP
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> materialize(parallelize_module(model, mesh["tp"]), seed=1)                       # doctest: +SKIP
    """
    ranks = every_rank() if group is None else resolve_group(group)
    device_type, like, error = whereabouts(model, device)
    plan, view = None, [""]
    try:
        if error is not None:
            raise error
        plan = _Plan.make(model, seed, initial or {})
        view = plan.view
        plan.check()
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    agree(error, view, _WHAT, ranks, like)
    assert plan is not None
    error = None
    try:
        plan.run(device_type)
    except Exception as e:
        error = e
    agree(error, [""], f"{_WHAT}: filling", ranks, like)
    return model


@dataclass(frozen=True)
class _Shifted:
    """Another distribution, moved."""

    base: Initializer
    shift: float

    def fill(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return self.base.fill(generator, shape) + np.float32(self.shift)


@dataclass(frozen=True)
class _Start:
    """How one parameter begins."""

    tensor: ModelTensor
    initializer: Initializer
    zero_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Plan:
    model: Module
    seed: int
    tensors: list[ModelTensor]
    starts: list[_Start]
    buffers: BufferPlan
    unset: list[str]

    @classmethod
    def make(cls, model: Module, seed: int, initial: Mapping[str, Initializer]) -> _Plan:
        if type(seed) is not int or seed < 0:
            raise CheckpointError(f"seed={seed!r}: expected an integer, 0 or more")
        tensors = model_tensors(model)
        common_group(tensors)
        _check_patterns(initial, tensors)
        draws = get_weight_backend().initial_draws(model)
        buffers = get_weight_backend().plan_buffers(model)
        starts, unset = [], list(buffers.unset)
        for tensor in tensors:
            if tensor.has_memory:
                continue
            start = _start(tensor, initial, draws)
            if isinstance(start, _Start):
                starts.append(start)
            else:
                unset.append(f"{tensor.name} ({start})")
        return cls(model, seed, tensors, starts, buffers, unset)

    @property
    def view(self) -> list[str]:
        parts = "\n".join(f"{t.names} {t.spec} {t.dtype} {t.has_memory}" for t in self.tensors)
        starts = "\n".join(f"{s.tensor.name} {s.initializer} {s.zero_rows}" for s in self.starts)
        digest = hashlib.sha256(f"{parts}\n{starts}".encode()).hexdigest()[:16]
        return [f"seed {self.seed}", f"model {digest}"]

    def check(self) -> None:
        if self.unset:
            raise CheckpointError(
                "these would be left without values: " + "; ".join(self.unset) + ". Give parameters a distribution "
                "(initial={pattern: Normal(0.02)}), set buffers before (module.buffer = value), or load a checkpoint"
            )

    def run(self, device_type: str) -> None:
        for start in self.starts:
            _fill(start, self.seed, device_type)
        get_weight_backend().set_buffers(self.buffers, device_type)
        if unset := get_weight_backend().without_memory(self.model):
            raise CheckpointError(f"left without values: {', '.join(unset)}")


def _start(
    tensor: ModelTensor, initial: Mapping[str, Initializer], draws: Mapping[int, Draw | str]
) -> _Start | str:
    """How a parameter begins; in words why nobody knows, else. The last pattern that names it wins."""
    given = [i for pattern, i in initial.items() if any(fnmatchcase(n, pattern) for n in tensor.names)]
    if given:
        return _Start(tensor, given[-1])
    for module, own in tensor.slots:  # the library's own layers know their distributions
        if isinstance(module, SharedLayer) and own in module._initializers:
            padding = getattr(module, "padding_idx", None)
            return _Start(tensor, module._initializers[own], () if padding is None else (padding,))
    draw = draws.get(id(tensor.tensor), "nothing in the model's code initialises it")
    return _Start(tensor, _initializer(draw), draw.zero_rows) if isinstance(draw, Draw) else draw


def _fill(start: _Start, seed: int, device_type: str) -> None:
    tensor = start.tensor
    values = draw_shard(tensor.name, tensor.spec, tensor.rank, start.initializer, seed)
    for row in start.zero_rows:
        values[_local_rows(tensor.spec, tensor.rank, row)] = 0
    new = get_weight_backend().allocate(tensor.slots, tensor.tensor, device_type)
    get_module_backend().fill_parameter(new, values)


def _local_rows(spec: ShardSpec, rank: int, row: int) -> list[int]:
    """Where a row of the whole lies in this rank's part."""
    if spec.dim != 0:
        return [row]
    found, offset = [], 0
    for first, stop in spec.ranges[rank]:
        if first <= row < stop:
            found.append(offset + row - first)
        offset += stop - first
    return found


def _initializer(draw: Draw) -> Initializer:
    if draw.kind == "constant":
        return Constant(draw.numbers[0])
    first, second = draw.numbers
    if draw.kind == "normal":
        return Normal(second) if first == 0 else _Shifted(Normal(second), first)
    middle, half = (first + second) / 2, (second - first) / 2
    return Uniform(half) if middle == 0 else _Shifted(Uniform(half), middle)


def _check_patterns(initial: Mapping[str, Initializer], tensors: Sequence[ModelTensor]) -> None:
    names = [name for t in tensors for name in t.names]
    for pattern in initial:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CheckpointError(f"initial names {pattern!r}, but no parameter is called so")
