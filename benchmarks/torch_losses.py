"""The losses that are compared on PyTorch: ours by every entry, and those of other libraries from their packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel import DTensor, Shard, init_device_mesh, loss_parallel

__all__ = ["Loss", "Setting", "available_losses"]


@dataclass
class Loss:
    """A way to the loss: from this rank's logits ``[tokens, local classes]`` to the mean loss."""

    compute: Callable[[torch.Tensor], torch.Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What forward and backward have to run in."""
    keeps: bool = False
    """Whether the caller holds on to the logits meanwhile."""


@dataclass
class Setting:
    """One problem: all ranks see the same target."""

    target: torch.Tensor
    classes: int
    native_mesh: object
    mesh: object

    @classmethod
    def make(cls, tokens: int, classes: int) -> Setting:
        """With a fixed target, on all ranks of the job."""
        size = dist.get_world_size()
        native = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        target = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(1))
        return cls(target, classes, native, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))


def available_losses(setting: Setting, only: list[str] | None = None) -> tuple[dict[str, Loss], dict[str, str]]:
    """Name -> loss, and name -> why it cannot run here; of all, or of those named."""
    makers = {
        "ours: context, DTensor": _context,
        "ours: context, torch DTensor": _context_native,
        "ours: functional": _functional,
        "ours: functional, logits kept": partial(_functional, keep=True),
        "ours: functional, in place": partial(_functional, inplace=True, keep=True),
        "PyTorch loss_parallel": _pytorch,
        "TorchTitan": _torchtitan,
        "Megatron-Core": partial(_megatron, keep=False),
        "Megatron-Core, fp32 logits kept": partial(_megatron, keep=True),
        "gather + cross_entropy": _gather,
    }
    found: dict[str, Loss] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        if only is not None and name not in only:
            continue
        try:
            found[name] = make(setting)
        except ImportError as e:
            missing[name] = f"not installed ({e})"
    return found, missing


def _context(setting: Setting) -> Loss:
    def loss(x: torch.Tensor) -> torch.Tensor:
        logits = DTensor.from_local(x, setting.mesh, [Shard(1)], shape=(len(x), setting.classes))
        with loss_parallel():
            return F.cross_entropy(logits, setting.target).to_local()

    return Loss(loss)


def _context_native(setting: Setting) -> Loss:
    from torch.distributed.tensor import DTensor as Native
    from torch.distributed.tensor import Shard as NativeShard

    def loss(x: torch.Tensor) -> torch.Tensor:
        logits = Native.from_local(x, setting.native_mesh, [NativeShard(1)], run_check=False)
        with loss_parallel():
            return F.cross_entropy(logits, setting.target).to_local()

    return Loss(loss)


def _functional(setting: Setting, inplace: bool = False, keep: bool = False) -> Loss:
    function = importlib.import_module("hyper_parallel.loss_parallel.functional").vocab_parallel_cross_entropy

    def loss(x: torch.Tensor) -> torch.Tensor:
        return function(x, setting.target, setting.mesh["tp"], num_classes=setting.classes, inplace=inplace)

    return Loss(loss, keeps=keep)


def _pytorch(setting: Setting) -> Loss:
    from torch.distributed.tensor import DTensor as Native
    from torch.distributed.tensor import Shard as NativeShard
    from torch.distributed.tensor.parallel import loss_parallel as their_loss_parallel

    def loss(x: torch.Tensor) -> torch.Tensor:
        logits = Native.from_local(x, setting.native_mesh, [NativeShard(1)], run_check=False)
        return F.cross_entropy(logits, setting.target).to_local()

    return Loss(loss, their_loss_parallel)  # their backward has to run inside


def _torchtitan(setting: Setting) -> Loss:
    from torch.distributed.tensor import DTensor as Native
    from torch.distributed.tensor import Shard as NativeShard
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")  # logits as a DTensor, labels as a plain tensor

    def loss(x: torch.Tensor) -> torch.Tensor:
        logits = Native.from_local(x[None], setting.native_mesh, [NativeShard(2)], run_check=False)
        return cross_entropy_loss(logits, setting.target[None]) / len(x)

    return Loss(loss)


def _megatron(setting: Setting, keep: bool) -> Loss:
    """It overwrites fp32 logits in the forward pass; who needs them afterwards copies them."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

    def loss(x: torch.Tensor) -> torch.Tensor:
        own = x.clone() if keep and x.dtype == torch.float32 else x
        return vocab_parallel_cross_entropy(own[:, None], setting.target[:, None]).mean()

    return Loss(loss)


def _gather(setting: Setting) -> Loss:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(_GatherClasses.apply(x).float(), setting.target)

    return Loss(loss)


class _GatherClasses(torch.autograd.Function):
    """All-gather along the last dim; the gradient of the whole is the same on all ranks, each takes its part."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()
