"""What PyTorch does to a model from outside: checkpointed and compiled layers, DistributedDataParallel, FSDP2."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.platform.torch.interop import native_mesh
from hyper_parallel.platform.training import ModelSettings

if TYPE_CHECKING:
    from hyper_parallel.core.device_mesh import DeviceMesh

__all__ = ["blocks_of", "wrap_blocks", "wrap_data_parallel"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers: the children of the outermost module lists.

    Raises:
        ValueError: the model has none.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))}
    outermost = [m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists if o != n)]
    blocks = [block for found in outermost for block in found.children()]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} keeps its layers in no nn.ModuleList, so there is nothing to checkpoint or compile"
        )
    return blocks


def wrap_blocks(model: nn.Module, settings: ModelSettings) -> None:
    """Checkpoint and compile the layers, in place; names of modules and parameters stay."""
    if settings.activation_checkpoint == "full":
        for block in blocks_of(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if settings.compile:
        for block in blocks_of(model):
            block.compile(backend=settings.compile_backend)


def wrap_data_parallel(model: nn.Module, settings: ModelSettings) -> nn.Module:
    """The model as the ranks of ``settings.data_mesh`` run it together. Collective over them."""
    mesh = settings.data_mesh
    if mesh is None or settings.data_parallel == "replicate":
        return model
    if settings.data_parallel == "fsdp":
        return _fully_shard(model, mesh, settings.compute_dtype)
    return _distributed(model, mesh) if mesh.size() > 1 else model


def _distributed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    group = mesh.get_group().handle
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    # a hook of one's own is not followed by a division by the number of ranks
    wrapped.register_comm_hook(group, _sum_bucket)
    return wrapped


def _sum_bucket(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    own = bucket.buffer()
    wide = own.float() if own.dtype in (torch.bfloat16, torch.float16) else own
    done = dist.all_reduce(wide, group=group, async_op=True).get_future()
    future: torch.futures.Future[Tensor] = done.then(lambda f: own if wide is own else own.copy_(wide))
    return future


# DDP looks at the annotations, which are mere text in this module
_sum_bucket.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _fully_shard(model: nn.Module, mesh: DeviceMesh, compute_dtype: str) -> nn.Module:
    """Layer by layer, then what is left."""
    try:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise ValueError(f"data_parallel 'fsdp' needs PyTorch 2.6 or newer, found {torch.__version__}") from None
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if compute_dtype == "bfloat16"
        else MixedPrecisionPolicy()
    )
    native = native_mesh(mesh)
    for block in blocks_of(model):
        fully_shard(block, mesh=native, mp_policy=policy)
    fully_shard(model, mesh=native, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are terms of a sum
            module.set_force_sum_reduction_for_comms(True)
    return model
