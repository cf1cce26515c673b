"""The MindSpore backend behind the Platform interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.platform.mindspore._versions import check_versions

check_versions()  # with a NumPy that does not fit, importing MindSpore or its first operator fails without saying why

import mindspore  # noqa: E402
from mindspore import Tensor, communication, ops  # noqa: E402

from hyper_parallel.platform.mindspore import (  # noqa: E402
    _bytecode_capture,
    _communicator,
    _cpu_kernels,
    _extremum,
    _host,
    collectives,
    custom_grad,
    dtensor,
    loss_arguments,
    op_names,
    random,
)
from hyper_parallel.platform.platform import (  # noqa: E402
    Function,
    Group,
    LossArguments,
    NativeDTensor,
    NativeMesh,
    Platform,
)

if TYPE_CHECKING:
    from hyper_parallel.platform.loss_kernels import LossKernels

__all__ = ["MindSporePlatform", "create_platform"]

_DEVICE_TARGETS = {"cpu": "CPU", "npu": "Ascend", "cuda": "GPU"}
_DEVICE_TYPES = {target: device for device, target in _DEVICE_TARGETS.items()}


def create_platform() -> Platform:
    """Build the backend; importing this module has checked the versions."""
    return MindSporePlatform()


class MindSporePlatform(Platform):
    """MindSpore in PyNative mode, on CPU and Ascend."""

    name = "mindspore"
    version = mindspore.__version__
    tensor_base = dtensor.TensorBase

    def __init__(self) -> None:
        self._communicators: dict[tuple[int, ...], _communicator.Communicator] = {}

    # -- processes ---------------------------------------------------------------------------------------

    def ensure_initialized(self, device_type: str) -> None:
        if device_type not in _DEVICE_TARGETS:
            raise ValueError(f"unknown device type {device_type!r}; expected one of {sorted(_DEVICE_TARGETS)}")
        if _communicator.is_initialized():
            return
        target = _DEVICE_TARGETS[device_type]
        if mindspore.get_context("device_target") != target:
            mindspore.set_device(target)
        if target == "CPU":
            # operators that run at once: many times faster where processes share the cores, and an operator that the
            # device lacks fails where it is called
            mindspore.runtime.launch_blocking()
        if "MS_ROLE" in os.environ or "RANK_TABLE_FILE" in os.environ or int(os.environ.get("RANK_SIZE", "1")) > 1:
            communication.init()

    def rank(self) -> int:
        return int(communication.get_rank()) if _communicator.is_initialized() else 0

    def world_size(self) -> int:
        return int(communication.get_group_size()) if _communicator.is_initialized() else 1

    def create_group(self, rank_lists: Sequence[tuple[int, ...]]) -> Group:
        own_rank = self.rank()
        mine = next((tuple(ranks) for ranks in rank_lists if own_rank in ranks), (own_rank,))
        if len(mine) == 1:
            return Group(mine, None, 0)
        handle = self._communicators.get(mine)
        if handle is None:  # only members create a group, and MindSpore refuses to create one twice
            handle = self._communicators[mine] = _communicator.create_communicator(mine)
        return Group(mine, handle, mine.index(own_rank))

    def adopt_group(self, group: Any) -> Group:
        if not isinstance(group, str):
            raise TypeError(f"expected the name of a MindSpore process group, found {type(group).__name__}")
        size = communication.get_group_size(group)
        ranks = tuple(int(communication.get_world_rank_from_group_rank(group, i)) for i in range(size))
        if group == communication.GlobalComm.WORLD_COMM_GROUP:
            ranks = tuple(range(size))
        handle = _communicator.Communicator(group)
        return Group(ranks, handle, ranks.index(self.rank()))

    def describe_native_mesh(self, mesh: Any) -> NativeMesh:
        raise TypeError(f"MindSpore has no mesh object to adopt, found {type(mesh).__name__}; use init_device_mesh")

    # -- collectives -------------------------------------------------------------------------------------

    def all_reduce(self, x: Any, op: str, group: Group) -> Any:
        return collectives.all_reduce(x, op, group)

    def all_gather(self, x: Any, group: Group) -> Any:
        return collectives.all_gather(x, group)

    def all_gather_uneven(self, x: Any, dim: int, sizes: Sequence[int], group: Group) -> Any:
        return collectives.all_gather_uneven(x, dim, sizes, group)

    def reduce_scatter_uneven(self, x: Any, dim: int, sizes: Sequence[int], group: Group) -> Any:
        return collectives.reduce_scatter_uneven(x, dim, sizes, group)

    def all_to_all_uneven(self, chunks: Sequence[Any], shapes: Sequence[tuple[int, ...]], group: Group) -> list[Any]:
        return collectives.all_to_all_uneven(chunks, shapes, group)

    def broadcast(self, x: Any, src: int, group: Group) -> Any:
        return collectives.broadcast(x, src, group)

    # -- autograd ----------------------------------------------------------------------------------------

    def linear_map(
        self,
        x: Any,
        forward: Callable[[Any], Any],
        adjoint: Callable[[Any], Any],
        again: Callable[[Any], Any] | None = None,
    ) -> Any:
        return custom_grad.linear_map(x, forward, adjoint, again)

    def requires_grad(self, x: Any) -> bool:
        return custom_grad.requires_grad(x)

    # -- tensors -----------------------------------------------------------------------------------------

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(Tensor.shape.__get__(x))

    def is_floating_point(self, x: Any) -> bool:
        return self.dtype_name(x).startswith(("float", "bfloat"))

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype).lower()

    def device_type(self, x: Any) -> str:
        return _DEVICE_TYPES[x.device.partition(":")[0]]

    def narrow(self, x: Any, dim: int, start: int, length: int) -> Any:
        if length == 0:
            return self._zero_length(x, dim)
        return _cpu_kernels.call("Narrow", ops.narrow, (x, dim, start, length), {}).contiguous()

    def cat(self, tensors: Sequence[Any], dim: int) -> Any:
        return _cpu_kernels.concat(tensors, dim)

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return ops.reshape(x, tuple(shape))

    def where(self, condition: Any, x: Any, other: float) -> Any:
        return _cpu_kernels.call("Select", ops.where, (condition, x, other), {})

    def extremum(self, x: Any, dim: int, largest: bool) -> tuple[Any, Any]:
        return _extremum.extremum(x, dim, largest)

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return ops.zeros(tuple(shape), like.dtype)

    def detach(self, x: Any) -> Any:
        return ops.stop_gradient(x)

    def clone(self, x: Any) -> Any:
        return custom_grad.linear_map(x, collectives.copy, lambda g: g)

    def copy_leaf(self, x: Any) -> Any:
        # a tensor says nothing of gradients: mindspore.grad is told what to differentiate by
        return Tensor(dtensor.as_local(x).asnumpy())

    def to_numpy(self, x: Any) -> Any:
        host = _host.to_host(dtensor.as_local(x))
        return host.astype(np.float32) if host.dtype == _host.BFLOAT16 else host

    def from_numpy(self, array: Any, like: Any | None = None) -> Any:
        return Tensor(np.ascontiguousarray(array))

    def _zero_length(self, x: Any, dim: int) -> Any:
        """An empty slice, which ``ops.narrow`` refuses; still on the graph."""
        shape = tuple(x.shape)
        empty = (*shape[:dim], 0, *shape[dim + 1 :])
        return custom_grad.linear_map(x, lambda v: ops.zeros(empty, v.dtype), lambda g: ops.zeros(shape, g.dtype))

    # -- DTensor -----------------------------------------------------------------------------------------

    def local_mode(self) -> AbstractContextManager[Any]:
        return dtensor.local_mode()

    def as_dtensor(self, cls: type, local: Any, layout: Any, *, fresh: bool = False) -> Any:
        return dtensor.as_dtensor(cls, local, layout, fresh=fresh)

    def as_local(self, x: Any) -> Any:
        return dtensor.as_local(x)

    def call_local(self, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return dtensor.call_local(op_call, args, kwargs)

    def uncaptured(self, function: Function) -> Function:
        return _bytecode_capture.uncaptured(function)

    def get_op_name(self, op_call: Any) -> str:
        return op_names.get_op_name(op_call)

    @property
    def local_op_names(self) -> frozenset[str]:
        return op_names.LOCAL_OP_NAMES

    def is_native_dtensor(self, x: Any) -> bool:
        return False

    def take_native_dtensor(self, tensor: Any) -> NativeDTensor:
        raise TypeError(f"MindSpore has no distributed tensor of its own, found {type(tensor).__name__}")

    def make_native_dtensor(self, parts: NativeDTensor) -> Any:
        raise TypeError("MindSpore has no distributed tensor of its own; use to_local() or full_tensor()")

    def native_mesh(self, mesh: Any) -> Any:
        raise TypeError("MindSpore has no mesh object of its own")

    # -- random numbers ----------------------------------------------------------------------------------

    def draw_seed(self) -> int:
        return random.draw_seed()

    def peek_seed(self) -> int:
        return random.peek_seed()

    def set_seed(self, seed: int) -> None:
        random.set_seed(seed)

    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        return random.seeded(seed)

    # -- loss parallel -----------------------------------------------------------------------------------

    @cached_property
    def loss_kernels(self) -> LossKernels:  # type: ignore[override]
        from hyper_parallel.platform.mindspore.loss_kernels import MindSporeLossKernels  # needs layers above

        return MindSporeLossKernels()

    @property
    def loss_op_names(self) -> Mapping[str, str]:
        return op_names.LOSS_OP_NAMES

    def bind_loss_arguments(
        self, kind: str, op_call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LossArguments:
        return loss_arguments.bind(kind, op_call, args, kwargs)

    def loss_parallel_hook(
        self, intercept: Callable[[str, Any, Sequence[Any], Mapping[str, Any]], Any]
    ) -> AbstractContextManager[Any]:
        return nullcontext()  # all DTensors are ours here, and the dispatcher has seen them: see interop

    def sum_tokens(self, x: Any) -> Any:
        return custom_grad.sum_all(x)

    def divide(self, x: Any, y: Any) -> Any:
        return ops.div(x, y)

    def stack(self, tensors: Iterable[Any]) -> Any:
        return ops.stack(list(tensors))
