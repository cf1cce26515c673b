"""Memory and bytes of PyTorch's parameters and buffers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.platform.torch import buffers
from hyper_parallel.platform.torch.init_recorder import record_initialization
from hyper_parallel.platform.weights import BlockReader, BlockWriter, Buffer, BufferPlan, Draw, Slot, WeightBackend

__all__ = ["TorchWeightBackend", "create_weight_backend"]


def create_weight_backend() -> WeightBackend:
    """Build it."""
    return TorchWeightBackend()


class TorchWeightBackend(WeightBackend):
    """Tensors without memory are on the meta device."""

    def own_buffers(self, module: nn.Module) -> dict[str, Buffer]:
        local = module._non_persistent_buffers_set
        return {name: Buffer(b, name not in local) for name, b in module._buffers.items() if b is not None}

    def allocate(self, slots: Sequence[Slot], tensor: Tensor, device_type: str) -> Tensor:
        new: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=_device(device_type))
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
        for module, name in slots:
            table = module._parameters if name in module._parameters else module._buffers
            table[name] = new
        return new

    def writer(self, tensor: Tensor) -> BlockWriter:
        return _Writer(tensor)

    def reader(self, tensor: Tensor) -> BlockReader:
        return _Reader(tensor)

    def plan_buffers(self, model: nn.Module) -> BufferPlan:
        return buffers.plan_buffers(model)

    def set_buffers(self, plan: BufferPlan, device_type: str) -> None:
        buffers.set_buffers(plan, _device(device_type))

    def initial_draws(self, model: nn.Module) -> Mapping[int, Draw | str]:
        return record_initialization(model).draws

    def without_memory(self, model: nn.Module) -> list[str]:
        return [
            f"{name}.{own}" if name else own
            for name, module in model.named_modules()
            for own, tensor in {**module._parameters, **module._buffers, **buffers.tensors_beside(module)}.items()
            if tensor is not None and tensor.is_meta
        ]

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            # found by name, because importing FSDP takes long where nobody uses it
            if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
                module.reshard()  # type: ignore[operator]

    def empty_on(self, device_type: str) -> Tensor:
        return torch.empty(0, device=_device(device_type))


class _Writer(BlockWriter):
    def __init__(self, tensor: Tensor) -> None:
        self._target = tensor.detach()
        self._whole = self._target
        if not self._target.is_contiguous():
            self._whole = torch.empty_like(self._target, memory_format=torch.contiguous_format)
        self._flat = self._whole.view(-1)

    def put(self, start: int, raw: Any, dtype: str) -> None:
        values = torch.from_numpy(raw).view(getattr(torch, dtype))
        with torch.no_grad():
            self._flat[start : start + len(values)].copy_(values)

    def close(self) -> None:
        if self._whole is not self._target:
            with torch.no_grad():
                self._target.copy_(self._whole)


class _Reader(BlockReader):
    def __init__(self, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().view(-1)
        self._bytes = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)

    def read(self, start: int, stop: int) -> Any:
        return self._bytes[start:stop].cpu().numpy()


def _device(device_type: str) -> torch.device:
    if device_type == "cpu" or "LOCAL_RANK" not in os.environ:
        return torch.device(device_type)
    return torch.device(device_type, int(os.environ["LOCAL_RANK"]))
