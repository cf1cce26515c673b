"""What the ranks find out about a cross-entropy call before its collectives: the same inputs, or the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.errors import LossParallelLayoutError
from hyper_parallel.loss_parallel.agreement import View, agree, digest
from hyper_parallel.loss_parallel.inputs import LossInputs, check_target_values
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import LossArguments, Tensor

__all__ = ["agreed", "shared_text"]


def agreed(call: LossArguments, like: Tensor, make: Callable[[], LossInputs | None]) -> LossInputs | None:
    """What ``make`` gives on this rank, once every rank has got there; or on every rank the same error.

    ``like``: a local tensor on the device that the ranks communicate from.
    """
    layout: Layout = call.input.global_layout
    validate = get_platform().loss_kernels.validates_by_default(like)
    inputs: LossInputs | None = None
    error: Exception | None = None
    values: dict[str, Any] = {}
    try:
        inputs = make()
        if validate and inputs is not None:
            values = _target_view(call, inputs)
    except (LossParallelLayoutError, NotImplementedError, IndexError, TypeError, ValueError) as e:
        error = e
    if validate:
        text = shared_text(call, layout, with_weight=error is None)
        error = agree(View(error, text, **values), layout.mesh, like)
    if error is not None:
        raise error
    return inputs


def shared_text(call: LossArguments, layout: Layout, with_weight: bool = False) -> str:
    """What all ranks must see alike; ``with_weight``: the class weights were checked, so that they can be read."""
    platform = get_platform()
    text = f"{call.kind} of {platform.dtype_name(call.input)} logits with {layout.describe()}"
    if call.kind == "log_softmax":
        dim = call.dim % layout.ndim if call.dim is not None and -layout.ndim <= call.dim < layout.ndim else call.dim
        return f"{text}, dim={dim}"
    weight = ""
    if with_weight and platform.is_tensor(call.weight):
        weight = f", weight checksum {digest(platform.to_numpy(call.weight)):#010x}"
    return f"{text}, reduction={call.reduction!r}, ignore_index={call.ignore_index}{weight}"


def _target_view(call: LossArguments, inputs: LossInputs) -> dict[str, Any]:
    """Digest of the target, and along which mesh dims it must be the same."""
    values = check_target_values(call, inputs)
    mesh_dims = range(inputs.layout.mesh.ndim)
    return {
        "values": digest(values.astype("int64")),
        "value_dims": tuple(d for d in mesh_dims if d not in inputs.token_mesh_dims),
    }
