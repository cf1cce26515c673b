"""Buffers of a model whose parameters have no memory: they have values, since only parameters are deferred.

A buffer without memory is there only when somebody has built the model, or a part of it, on MindSpore's meta device.
"""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn

from hyper_parallel.platform.weights import Buffer, BufferPlan

__all__ = ["own_buffers", "plan_buffers", "tensors_beside"]


def own_buffers(cell: nn.Cell) -> dict[str, Buffer]:
    """The cell's registered buffers."""
    local = cell._non_persistent_buffers_set
    return {name: Buffer(b, name not in local) for name, b in cell._buffers.items() if b is not None}


def plan_buffers(model: nn.Cell) -> BufferPlan:
    """Nothing can be computed again; names what lacks values."""
    unset = []
    for name, cell in model.cells_and_names():
        buffers = {k: b.tensor for k, b in own_buffers(cell).items() if not b.persistent}
        for own, tensor in {**buffers, **tensors_beside(cell)}.items():
            if tensor.is_meta:
                unset.append(f"{name}.{own}" if name else own)
    return BufferPlan((), tuple(unset))


def tensors_beside(cell: nn.Cell) -> dict[str, Tensor]:
    """Tensors that a cell holds as plain attributes."""
    return {k: v for k, v in cell.__dict__.items() if isinstance(v, Tensor) and not isinstance(v, Parameter)}
