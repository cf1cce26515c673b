"""The PyTorch backend behind the Platform interface."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hyper_parallel.errors import PlatformError
from hyper_parallel.platform.platform import Group, LossArguments, NativeDTensor, NativeMesh, Platform
from hyper_parallel.platform.torch import _gloo_exit, collectives, dtensor, interop, loss_arguments, op_names, random
from hyper_parallel.platform.torch.custom_grad import linear_map

if TYPE_CHECKING:
    from hyper_parallel.platform.loss_kernels import LossKernels

__all__ = ["TorchPlatform", "create_platform"]

_OLDEST = (2, 12)


def create_platform() -> Platform:
    """Check the installed version, then build the backend."""
    found = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    if found < _OLDEST:
        raise PlatformError(f"PyTorch {torch.__version__} is too old; expected at least {'.'.join(map(str, _OLDEST))}")
    _gloo_exit.wait_at_exit()
    return TorchPlatform()


class TorchPlatform(Platform):
    """PyTorch on any device that ``torch.distributed`` serves."""

    name = "torch"
    version = torch.__version__
    tensor_base = dtensor.TensorBase

    # -- processes ---------------------------------------------------------------------------------------------

    def ensure_initialized(self, device_type: str) -> None:
        if dist.is_initialized():
            return
        backend = {"cuda": "cpu:gloo,cuda:nccl"}.get(device_type, "gloo")
        if device_type == "cuda" and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:  # one process alone: no rendezvous needed
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def create_group(self, rank_lists: Sequence[tuple[int, ...]]) -> Group:
        mine, own_rank, world = None, self.rank(), self.world_size()
        for ranks in rank_lists:
            if len(ranks) == world and list(ranks) == list(range(world)):
                handle: Any = dist.group.WORLD
            elif len(ranks) == 1:
                handle = None
            else:  # new_group is collective over all processes, members or not
                handle = dist.new_group(list(ranks), use_local_synchronization=False)
            if own_rank in ranks:
                mine = Group(tuple(ranks), handle, ranks.index(own_rank))
        return mine or Group((own_rank,), None, 0)

    def adopt_group(self, group: Any) -> Group:
        if isinstance(group, dist.DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"expected a torch.distributed process group, found {type(group).__name__}")
        ranks = tuple(dist.get_process_group_ranks(group))
        return Group(ranks, group, dist.get_rank(group))

    def describe_native_mesh(self, mesh: Any) -> NativeMesh:
        return interop.describe_mesh(mesh)

    # -- collectives -----------------------------------------------------------------------------------------------

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

    # -- autograd --------------------------------------------------------------------------------------------------

    def linear_map(
        self,
        x: Any,
        forward: Callable[[Any], Any],
        adjoint: Callable[[Any], Any],
        again: Callable[[Any], Any] | None = None,
    ) -> Any:
        return linear_map(x, forward, adjoint, again)

    def requires_grad(self, x: Any) -> bool:
        if not torch.is_grad_enabled():
            return False
        with dtensor.local_mode():
            return bool(x.requires_grad)

    def in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    # -- tensors -----------------------------------------------------------------------------------------------------

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def shape(self, x: Any) -> tuple[int, ...]:
        if isinstance(x, dtensor.TensorBase):
            with dtensor.local_mode():
                return tuple(torch.Tensor.shape.__get__(x))  # type: ignore[attr-defined]
        return tuple(x.shape)

    def is_floating_point(self, x: Any) -> bool:
        return bool(x.dtype.is_floating_point)

    def dtype_name(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def device_type(self, x: Any) -> str:
        return str(x.device.type)

    def narrow(self, x: Any, dim: int, start: int, length: int) -> Any:
        return x.narrow(dim, start, length)

    def cat(self, tensors: Sequence[Any], dim: int) -> Any:
        return torch.cat(list(tensors), dim)

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(tuple(shape))

    def where(self, condition: Any, x: Any, other: float) -> Any:
        return torch.where(condition, x, other)

    def extremum(self, x: Any, dim: int, largest: bool) -> tuple[Any, Any]:
        x = x.detach()
        if x.shape[dim] == 0:
            if x.dtype.is_floating_point:
                worst: float = -math.inf if largest else math.inf
            else:
                limits = torch.iinfo(x.dtype)
                worst = limits.min if largest else limits.max
            shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
            return x.new_full(shape, worst), torch.zeros(shape, dtype=torch.int64, device=x.device)
        values, indices = (torch.max if largest else torch.min)(x, dim, keepdim=True)
        return values, indices

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)

    def detach(self, x: Any) -> Any:
        return x.detach()

    def clone(self, x: Any) -> Any:
        return x.clone(memory_format=torch.contiguous_format)

    def copy_leaf(self, x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad)

    def to_numpy(self, x: Any) -> Any:
        x = dtensor.as_local(x).detach().cpu()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()

    def from_numpy(self, array: Any, like: Any | None = None) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
        return tensor if like is None else tensor.to(like.device)

    # -- DTensor -----------------------------------------------------------------------------------------------------

    local_dtype = staticmethod(torch.Tensor.dtype.__get__)  # type: ignore[attr-defined]

    def local_mode(self) -> AbstractContextManager[Any]:
        return dtensor.local_mode()

    def as_dtensor(self, cls: type, local: Any, layout: Any, *, fresh: bool = False) -> Any:
        return dtensor.as_dtensor(cls, local, layout, fresh=fresh)

    def as_local(self, x: Any) -> Any:
        return dtensor.as_local(x)

    def call_local(self, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return dtensor.call_local(op_call, args, kwargs)

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return dtensor.opaque(function)

    def get_op_name(self, op_call: Any) -> str:
        return op_names.get_op_name(op_call)

    @property
    def local_op_names(self) -> frozenset[str]:
        return op_names.LOCAL_OP_NAMES

    def is_native_dtensor(self, x: Any) -> bool:
        return interop.is_native_dtensor(x)

    def take_native_dtensor(self, tensor: Any) -> NativeDTensor:
        return interop.take_apart(tensor)

    def make_native_dtensor(self, parts: NativeDTensor) -> Any:
        return interop.put_together(parts)

    def native_mesh(self, mesh: Any) -> Any:
        return interop.native_mesh(mesh)

    # -- random numbers ------------------------------------------------------------------------------------------------

    def draw_seed(self) -> int:
        return random.draw_seed()

    def peek_seed(self) -> int:
        return random.peek_seed()

    def set_seed(self, seed: int) -> None:
        random.set_seed(seed)

    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        return random.seeded(seed)

    # -- loss parallel ------------------------------------------------------------------------------------------------

    @cached_property
    def loss_kernels(self) -> LossKernels:  # type: ignore[override]
        from hyper_parallel.platform.torch.loss_kernels import TorchLossKernels  # needs layers above

        return TorchLossKernels()

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
        return interop.NativeDTensorMode(intercept)

    def sum_tokens(self, x: Any) -> Any:
        return x.sum()

    def divide(self, x: Any, y: Any) -> Any:
        return x / y

    def stack(self, tensors: Iterable[Any]) -> Any:
        return torch.stack(list(tensors))
