"""Memory and bytes of MindSpore's parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from hyper_parallel.platform.mindspore import _host, buffers
from hyper_parallel.platform.mindspore._float_casts import cast_into, host_dtype
from hyper_parallel.platform.mindspore.deferred import DRAW, is_deferred, replace_value
from hyper_parallel.platform.mindspore.init_recorder import describe_initializer
from hyper_parallel.platform.weights import BlockReader, BlockWriter, Buffer, BufferPlan, Draw, Slot, WeightBackend

__all__ = ["MindSporeWeightBackend", "create_weight_backend", "fill"]


def create_weight_backend() -> WeightBackend:
    """Build it."""
    return MindSporeWeightBackend()


def fill(parameter: Tensor, values: Any) -> None:
    """Store the values of a NumPy array, cast to the parameter's dtype, in memory that it has."""
    writer = _Writer(parameter)
    writer.put(0, np.ascontiguousarray(values).reshape(-1).view(np.uint8), values.dtype.name)
    writer.close()


class MindSporeWeightBackend(WeightBackend):
    """Tensors without memory are on the meta device. Parameters stay the objects that they are."""

    def own_buffers(self, module: nn.Cell) -> dict[str, Buffer]:
        return buffers.own_buffers(module)

    def allocate(self, slots: Sequence[Slot], tensor: Tensor, device_type: str) -> Tensor:
        if isinstance(tensor, Parameter):
            replace_value(tensor, _empty(tuple(tensor.shape), tensor.dtype, device_type))
            return tensor
        new = _empty(tuple(tensor.shape), tensor.dtype, device_type)
        for cell, name in slots:
            cell._buffers[name] = new
        return new

    def writer(self, tensor: Tensor) -> BlockWriter:
        return _Writer(tensor)

    def reader(self, tensor: Tensor) -> BlockReader:
        return _Reader(tensor)

    def plan_buffers(self, model: nn.Cell) -> BufferPlan:
        return buffers.plan_buffers(model)

    def set_buffers(self, plan: BufferPlan, device_type: str) -> None:
        """Nothing: a plan of this backend holds no values."""

    def initial_draws(self, model: nn.Cell) -> Mapping[int, Draw | str]:
        found: dict[int, Draw | str] = {}
        for parameter in model.get_parameters():
            if not is_deferred(parameter):
                continue
            draw = getattr(parameter, DRAW, None)
            if draw is None and parameter.init is not None:  # built on the meta device by somebody else
                spec = getattr(parameter, "_shard_spec", None)
                draw = describe_initializer(parameter.init, tuple(parameter.shape) if spec is None else spec.shape)
            if draw is not None:
                found[id(parameter)] = draw
        return found

    def without_memory(self, model: nn.Cell) -> list[str]:
        return [
            f"{name}.{own}" if name else own
            for name, cell in model.cells_and_names()
            for own, tensor in {**cell._params, **cell._buffers, **buffers.tensors_beside(cell)}.items()
            if tensor is not None and is_deferred(tensor)
        ]

    def reshard(self, model: nn.Cell) -> None:
        """Nothing: the framework shards no parameters of a PyNative model."""

    def empty_on(self, device_type: str) -> Tensor:
        return _empty((0,), mindspore.float32, device_type)


class _Writer(BlockWriter):
    """Writes into the tensor's own memory where that is the host's, else into a copy that is stored at the end."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._name = _dtype_name(tensor)
        own = _host.to_bits(tensor) if _host.on_cpu() and tensor.is_contiguous() else None
        self._in_place = own is not None and own.flags.writeable
        if own is None or not self._in_place:
            own = np.empty(tuple(tensor.shape), host_dtype(self._name))
        self._bits = own
        self._flat = own.reshape(-1)

    def put(self, start: int, raw: Any, dtype: str) -> None:
        values = raw.view(host_dtype(dtype))
        cast_into(self._flat[start : start + len(values)], self._name, values, dtype)

    def close(self) -> None:
        if self._in_place:
            return
        new = _host.to_tensor(self._bits, _host.bits_dtype(self._tensor))
        if isinstance(self._tensor, Parameter):
            replace_value(self._tensor, new)
        else:
            self._tensor.assign_value(new)


class _Reader(BlockReader):
    def __init__(self, tensor: Tensor) -> None:
        bits = np.ascontiguousarray(_host.to_bits(tensor)).reshape(-1)
        self._bytes = bits.view(np.uint8) if bits.size else np.empty(0, np.uint8)

    def read(self, start: int, stop: int) -> Any:
        return self._bytes[start:stop]


def _empty(shape: tuple[int, ...], dtype: Any, device_type: str) -> Tensor:
    """Undefined content. On CPU it is NumPy's memory, which takes no room before it is written to."""
    if device_type != "cpu":
        return mint.empty(shape, dtype=dtype)
    name = str(dtype).lower().rpartition(".")[2]
    return _host.to_tensor(np.empty(shape, host_dtype(name)), _host.BFLOAT16 if name == "bfloat16" else None)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).lower()
