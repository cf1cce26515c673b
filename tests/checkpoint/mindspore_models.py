"""Models for MindSpore workers: whole ones, and the same built without memory and shared between all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, communication, nn, ops
from mindspore.common.initializer import initializer

from hyper_parallel import DeviceMesh, ParallelismConfig, init_device_mesh
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.llama.mindspore import LlamaForCausalLM
from hyper_parallel.platform.mindspore import _host
from hyper_parallel.platform.mindspore.deferred import deferred_parameters
from hyper_parallel.tensor_parallel.plan import parallelize_module
from tests.checkpoint.own_model import own_config


@cache
def tp_mesh() -> DeviceMesh:
    """All ranks of the group, as a 1-D mesh."""
    return init_device_mesh("cpu", (communication.get_group_size(),), mesh_dim_names=("tp",))


without_memory = deferred_parameters
"""A context: parameters created inside have no memory."""


def build(kind: str) -> Any:
    """An untrained whole model."""
    return LlamaForCausalLM(own_config(kind))


def large(config: LlamaConfig) -> Any:
    """Without memory, shared between all ranks."""
    with deferred_parameters():
        model = LlamaForCausalLM(config)
    return parallelize_module(model, tp_mesh())


def sharded(kind: str, dtype: str = "float32", meta: bool = True, mesh: Any = None) -> Any:
    """Without memory (or with any values), parallelised over all ranks; gives whole logits."""
    if meta:
        with deferred_parameters():
            model = build(kind)
    else:
        model = build(kind)
    if dtype != "float32":
        model.to(dtype=getattr(mindspore, dtype))
    model.set_train(False)
    return parallelize_module(model, mesh or tp_mesh(), config=ParallelismConfig(disable_loss_parallel=True))


def logits(model: Any) -> np.ndarray:
    ids = Tensor(np.arange(20).reshape(2, 10) * 11 % 251, mindspore.int32)
    out: np.ndarray = model(ids).asnumpy()
    return out


def named_parameters(model: Any) -> dict[str, Parameter]:
    """By their dotted names in the model; a tied one once."""
    found: dict[int, tuple[str, Parameter]] = {}
    for name, cell in model.cells_and_names():
        for own, parameter in cell._params.items():
            found.setdefault(id(parameter), (f"{name}.{own}" if name else own, parameter))
    return dict(found.values())


def has_memory(parameter: Parameter) -> bool:
    return not parameter.is_meta


def num_bytes(parameter: Parameter) -> int:
    return int(parameter.size) * int(parameter.itemsize)


def values(parameter: Any) -> np.ndarray:
    """bfloat16 as float32."""
    return np.array(_host.as_float32(parameter.asnumpy()))


def dtype_name(parameter: Parameter) -> str:
    return str(parameter.dtype).lower()


def transpose_memory(model: Any) -> None:
    """The same values in another order in memory."""
    for parameter in named_parameters(model).values():
        if parameter.ndim == 2:
            parameter.assign_value(ops.transpose(parameter, (1, 0)).contiguous().swapaxes(0, 1))
            assert not parameter.is_contiguous()


def head(model: Any) -> Parameter:
    return model.lm_head.weight


def embedding(model: Any) -> Parameter:
    return model.model.embed_tokens.weight


def sequence(*layers: nn.Cell) -> nn.Cell:
    return nn.SequentialCell(*layers)


def unknown_draws() -> nn.Cell:
    """A parameter, ``strange``, that is drawn as nobody knows."""

    class Strange(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.strange = Parameter(initializer("orthogonal", (4, 4)), name="strange")

    with without_memory():
        return Strange()
