"""hyper_parallel: tensor-parallel training with a vocabulary-parallel loss, on PyTorch and MindSpore.

Importing this package loads no framework; the backend is settled when the first name that needs one is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "get_platform": "hyper_parallel.platform",
    "ParallelismConfig": "hyper_parallel.config",
    "DeviceMesh": "hyper_parallel.core.device_mesh",
    "init_device_mesh": "hyper_parallel.core.device_mesh",
    "Shard": "hyper_parallel.core.placement_types",
    "Replicate": "hyper_parallel.core.placement_types",
    "Partial": "hyper_parallel.core.placement_types",
    "Layout": "hyper_parallel.core.layout",
    "DTensor": "hyper_parallel.core.dtensor",
    "distribute_tensor": "hyper_parallel.core.dtensor",
    "from_native": "hyper_parallel.core.native",
    "to_native": "hyper_parallel.core.native",
    "SkipDTensorDispatch": "hyper_parallel.core.state",
    "register_distributed_op": "hyper_parallel.core.shard.parallel_ops_register",
    "DistributedOp": "hyper_parallel.core.shard.distributed_op",
    "OpCall": "hyper_parallel.core.shard.distributed_op",
    "OpPlan": "hyper_parallel.core.shard.distributed_op",
    "is_loss_parallel_active": "hyper_parallel.loss_parallel",
    "get_train_context": "hyper_parallel.loss_parallel",
    "TrainContext": "hyper_parallel.loss_parallel",
    "LOSS_PARALLEL_OP_NAMES": "hyper_parallel.loss_parallel",
    "register_loss_parallel_op_names": "hyper_parallel.loss_parallel",
    "vocab_parallel_cross_entropy": "hyper_parallel.loss_parallel.functional",
    "linear_cross_entropy": "hyper_parallel.loss_parallel.linear",
    "vocab_parallel_argmax": "hyper_parallel.loss_parallel.argmax",
    "vocab_parallel_topk": "hyper_parallel.loss_parallel.argmax",
    "CopyToTPRegion": "hyper_parallel.tensor_parallel.regions",
    "GatherFromTPRegion": "hyper_parallel.tensor_parallel.regions",
    "ReduceFromTPRegion": "hyper_parallel.tensor_parallel.regions",
    "ScatterToTPRegion": "hyper_parallel.tensor_parallel.regions",
    "copy_to_tp_region": "hyper_parallel.tensor_parallel.regions",
    "gather_from_tp_region": "hyper_parallel.tensor_parallel.regions",
    "reduce_from_tp_region": "hyper_parallel.tensor_parallel.regions",
    "scatter_to_tp_region": "hyper_parallel.tensor_parallel.regions",
    "gather_from_sequence_region": "hyper_parallel.tensor_parallel.regions",
    "reduce_scatter_to_sequence_region": "hyper_parallel.tensor_parallel.regions",
    "ColumnParallelLinear": "hyper_parallel.tensor_parallel.layers",
    "RowParallelLinear": "hyper_parallel.tensor_parallel.layers",
    "VocabParallelEmbedding": "hyper_parallel.tensor_parallel.vocab_layers",
    "VocabParallelHead": "hyper_parallel.tensor_parallel.vocab_layers",
    "ColwiseParallel": "hyper_parallel.tensor_parallel.styles",
    "RowwiseParallel": "hyper_parallel.tensor_parallel.styles",
    "LinearLossParallel": "hyper_parallel.tensor_parallel.linear_loss",
    "NoParallel": "hyper_parallel.tensor_parallel.prepare",
    "PrepareModuleInput": "hyper_parallel.tensor_parallel.prepare",
    "PrepareModuleInputOutput": "hyper_parallel.tensor_parallel.prepare",
    "PrepareModuleOutput": "hyper_parallel.tensor_parallel.prepare",
    "SequenceParallel": "hyper_parallel.tensor_parallel.prepare",
    "parallelize_module": "hyper_parallel.tensor_parallel.plan",
    "sharding_report": "hyper_parallel.tensor_parallel.plan",
    "DimShardLoader": "hyper_parallel.tensor_parallel.shard_loader",
    "ReplicateLoader": "hyper_parallel.tensor_parallel.shard_loader",
    "ShardLoader": "hyper_parallel.tensor_parallel.shard_loader",
    "register_loader": "hyper_parallel.tensor_parallel.shard_loader",
    "clip_grad_norm_": "hyper_parallel.tensor_parallel.grad_norm",
    "load_hf_checkpoint": "hyper_parallel.tensor_parallel.hf_checkpoint",
    "save_hf_checkpoint": "hyper_parallel.tensor_parallel.hf_checkpoint",
    "materialize": "hyper_parallel.tensor_parallel.materialize",
    "HyperParallelError": "hyper_parallel.errors",
    "LossParallelLayoutError": "hyper_parallel.errors",
    "LossParallelUnsupportedError": "hyper_parallel.errors",
    "PlatformError": "hyper_parallel.errors",
    "UnsupportedOperatorError": "hyper_parallel.errors",
}
_PACKAGES = ("loss_parallel",)
_WITH_DISPATCHER = ("hyper_parallel.core.dtensor", "hyper_parallel.core.native", "hyper_parallel.tensor_parallel.")

__all__ = sorted([*_EXPORTS, *_PACKAGES])

if TYPE_CHECKING:
    from hyper_parallel.config import ParallelismConfig as ParallelismConfig
    from hyper_parallel.core.device_mesh import DeviceMesh as DeviceMesh
    from hyper_parallel.core.device_mesh import init_device_mesh as init_device_mesh
    from hyper_parallel.core.dtensor import DTensor as DTensor
    from hyper_parallel.core.dtensor import distribute_tensor as distribute_tensor
    from hyper_parallel.core.layout import Layout as Layout
    from hyper_parallel.core.placement_types import Partial as Partial
    from hyper_parallel.core.placement_types import Replicate as Replicate
    from hyper_parallel.core.placement_types import Shard as Shard
    from hyper_parallel.loss_parallel.context import loss_parallel as loss_parallel
    from hyper_parallel.platform import get_platform as get_platform


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"hyper_parallel.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")
    module = _EXPORTS[name]
    if module.startswith(_WITH_DISPATCHER):
        importlib.import_module("hyper_parallel.loss_parallel")  # tells the dispatcher about cross-entropy
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
