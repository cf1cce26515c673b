"""The last layer of a model, shared between the ranks of a mesh dim, with the model's own code untouched."""

from __future__ import annotations

from typing import Any

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.redistribute import reduce_gradient
from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import TrainingTools

__all__ = ["parallelize_last_layer"]


def parallelize_last_layer(
    tools: TrainingTools, model: Any, layer: str, mesh: DeviceMesh, config: ParallelismConfig
) -> None:
    """Cut a linear layer without bias over its output features, in ``torch.chunk`` sizes.

    Input ``R@tp``; output ``S(-1)@tp`` as a DTensor, or with ``config.disable_loss_parallel`` a plain tensor
    that is whole on every rank. Forward runs no collective (an all-gather when disabled); backward
    all-reduces the input's gradient.

    Args:
        tools: the backend's.
        model: still without memory.
        layer: name of the layer in the model.
        mesh: 1-D, the ranks that share it.
        config: whether the logits stay cut.

    Raises:
        ValueError: the layer's weight is not a matrix of its own (tied, or missing).
    """
    name = f"{layer}.weight"
    shape = tools.parameter_shapes(model).get(name, ())
    if len(shape) != 2:
        raise ValueError(
            f"{name} is not a matrix of its own (shape {shape}); the last layer cannot be cut over "
            f"{mesh.describe()} when it shares its weight with the embedding"
        )
    classes = shape[0]
    group = mesh.get_group()
    tools.cut_parameter(model, name, ShardSpec.chunk(shape, 0, group.size), group.rank)

    def before(hidden: Tensor) -> Tensor:
        layout = Layout(mesh, [Replicate()], get_platform().shape(hidden))
        return reduce_gradient(hidden, layout, [0])

    def after(local: Tensor) -> Tensor:
        whole = (*get_platform().shape(local)[:-1], classes)
        logits = DTensor.from_local(local, mesh, [Shard(-1)], shape=whole)
        return logits.full_tensor() if config.disable_loss_parallel else logits

    tools.wrap_layer(model, layer, before, after)
