"""Checks and layouts of a cross-entropy call: from DTensors to what the kernels take. No collective runs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.redistribute import redistribute_local
from hyper_parallel.errors import LossParallelLayoutError, LossParallelUnsupportedError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import LossArguments, Tensor

__all__ = ["LossInputs", "check_target_values", "class_dim_of", "prepare"]

_REDUCTIONS = ("none", "mean", "sum")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = tuple(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))


@dataclass(frozen=True)
class LossInputs:
    """A checked call.

    Attributes:
        layout: where the logits lie.
        compute_layout: where they will lie when the kernel runs; other than ``layout`` when classes are gathered.
        class_dim: the class dim of the logits.
        class_mesh_dim: the mesh dim that shards it in ``compute_layout``; None when no one does.
        token_mesh_dims: the mesh dims that shard tokens.
        target: local target, of the local tokens' shape.
        weight: all class weights, or None.
        token_layout: layout of the per-token losses.
        warning: what to tell the user when classes are gathered.
    """

    layout: Layout
    compute_layout: Layout
    class_dim: int
    class_mesh_dim: int | None
    token_mesh_dims: tuple[int, ...]
    target: Tensor
    weight: Tensor | None
    token_layout: Layout
    warning: str | None = None


def class_dim_of(ndim: int) -> int:
    """PyTorch's class dim: 0 of ``(C,)``, else 1."""
    return 0 if ndim == 1 else 1


def prepare(call: LossArguments, *, mesh: DeviceMesh | None, may_gather: bool, must_gather: bool = False) -> LossInputs:
    """Check a call and find out how to compute it.

    Args:
        call: its arguments; the input is a DTensor.
        mesh: the 1-D mesh whose ranks must share the classes; None: any mesh dim may.
        may_gather: gather the classes, with a warning, where the layout would else be an error.
        must_gather: gather the classes in any case.

    Raises:
        LossParallelLayoutError, LossParallelUnsupportedError, TypeError, ValueError: see the messages.
    """
    _check_options(call)
    layout: Layout = call.input.global_layout
    class_dim = class_dim_of(layout.ndim)
    class_mesh_dims = layout.tensor_map[class_dim]
    problem = _layout_problem(call.kind, layout, class_dim, class_mesh_dims, mesh)
    if problem is not None and not may_gather:
        raise LossParallelLayoutError(problem)
    if problem is None and must_gather:
        problem = f"{call.kind}: logits with {layout.describe()} outside loss_parallel()"
    compute_layout = layout
    if problem is not None:
        keep = [p if isinstance(p, Shard) and p.dim != class_dim else Replicate() for p in layout.placements]
        compute_layout, class_mesh_dims = layout.replace(keep), ()
    token_layout = _token_layout(compute_layout, class_dim)
    return LossInputs(
        layout=layout,
        compute_layout=compute_layout,
        class_dim=class_dim,
        class_mesh_dim=class_mesh_dims[0] if class_mesh_dims else None,
        token_mesh_dims=tuple(m for m, p in enumerate(token_layout.placements) if p.is_shard()),
        target=_target(call, token_layout),
        weight=_weight(call, layout, class_dim),
        token_layout=token_layout,
        warning=None if problem is None else f"{problem}; gathering the logits over the classes, which is slow",
    )


def check_target_values(call: LossArguments, inputs: LossInputs) -> np.ndarray:
    """The target's values on the host.

    Raises:
        IndexError: a target that is neither a class nor ``ignore_index``, as PyTorch raises.
    """
    values: np.ndarray = get_platform().to_numpy(inputs.target)
    classes = inputs.layout.shape[inputs.class_dim]
    bad = values[(values != call.ignore_index) & ((values < 0) | (values >= classes))]
    if bad.size:
        raise IndexError(
            f"Target {int(bad.ravel()[0])} is out of bounds for {classes} classes; {bad.size} such "
            f"target{'s' if bad.size > 1 else ''}, ignore_index={call.ignore_index}"
        )
    return values


def _check_options(call: LossArguments) -> None:
    platform = get_platform()
    if call.input.global_layout.ndim == 0:
        raise ValueError(f"{call.kind} needs logits with a class dim, found a 0-d DTensor")
    if platform.dtype_name(call.input) not in _FLOATS:
        raise TypeError(
            f"{call.kind} needs floating-point logits ({', '.join(_FLOATS)}), found {platform.dtype_name(call.input)}"
        )
    if call.reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_REDUCTIONS}, found {call.reduction!r}")
    if call.label_smoothing:
        raise LossParallelUnsupportedError(
            f"label_smoothing={call.label_smoothing} is not supported inside loss_parallel(); expected 0.0"
        )
    if not platform.is_tensor(call.target):
        raise TypeError(f"{call.kind} needs a target tensor, found {type(call.target).__name__}")
    if platform.is_floating_point(call.target):
        raise LossParallelUnsupportedError(
            f"the target is {platform.dtype_name(call.target)}: class probabilities are not supported inside "
            "loss_parallel(); expected class indices of an integer dtype"
        )
    if platform.dtype_name(call.target) not in _INTEGERS:
        raise TypeError(f"the target is {platform.dtype_name(call.target)}; expected class indices of an integer dtype")
    if platform.device_type(call.target) != platform.device_type(call.input):
        raise LossParallelLayoutError(
            f"the target is on {platform.device_type(call.target)!r}, the logits on "
            f"{platform.device_type(call.input)!r}; expected the same device"
        )


def _layout_problem(
    kind: str, layout: Layout, class_dim: int, class_mesh_dims: Sequence[int], mesh: DeviceMesh | None
) -> str | None:
    found = f"{kind}: logits with {layout.describe()}"
    expected = f"expected Shard({class_dim}) (the class dim) on exactly one mesh dim"
    if layout.has_partial:
        return f"{found} are still to be reduced; {expected}, found {layout.describe_placements()}"
    if len(class_mesh_dims) != 1:
        return f"{found}: {expected}, found it on {len(class_mesh_dims)} of them"
    if mesh is not None:
        group = layout.mesh.get_group(class_mesh_dims[0])
        if tuple(mesh.mesh.ravel().tolist()) != group.ranks:
            label = layout.mesh.dim_labels[class_mesh_dims[0]]
            return (
                f"{found}: classes are sharded over ranks {group.ranks} ({label}), expected over ranks "
                f"{tuple(mesh.mesh.ravel().tolist())} of the {mesh.describe()} given to loss_parallel()"
            )
    return None


def _token_layout(layout: Layout, class_dim: int) -> Layout:
    shape = layout.shape[:class_dim] + layout.shape[class_dim + 1 :]
    placements: list[Placement] = []
    for p in layout.placements:
        if isinstance(p, Shard) and p.dim != class_dim:
            placements.append(Shard(p.dim - (p.dim > class_dim)))
        else:
            placements.append(Replicate())
    return Layout(layout.mesh, placements, shape)


def _target(call: LossArguments, expected: Layout) -> Tensor:
    """The local target. A plain one may have the shape of all tokens (replicated) or of this rank's tokens."""
    platform, target = get_platform(), call.target
    if isinstance(target, DTensor):
        found = target.global_layout
        fits = found.mesh == expected.mesh and found.shape == expected.shape
        if not fits or any(
            f != e and not f.is_replicate() for f, e in zip(found.placements, expected.placements, strict=True)
        ):
            raise LossParallelLayoutError(f"the target has {found.describe()}; expected {expected.describe()}")
        return redistribute_local(platform.as_local(target), found, expected)
    shape = platform.shape(target)
    if shape == expected.shape:
        whole = expected.replace([Replicate()] * expected.mesh.ndim)
        return redistribute_local(target, whole, expected)
    if shape == expected.local_shape:
        return target
    local = "" if expected.is_replicated else f", or {expected.local_shape} (the tokens of this rank)"
    raise LossParallelLayoutError(
        f"the target has shape {shape}; expected {expected.shape}{local}, for logits of shape "
        f"{call.input.global_layout.shape} without their class dim"
    )


def _weight(call: LossArguments, layout: Layout, class_dim: int) -> Tensor | None:
    platform, weight = get_platform(), call.weight
    if weight is None:
        return None
    if not platform.is_tensor(weight):
        raise TypeError(f"weight must be a tensor, found {type(weight).__name__}")
    if isinstance(weight, DTensor):
        if not weight.global_layout.is_replicated:
            raise LossParallelLayoutError(
                f"the class weights have {weight.global_layout.describe()}; expected Replicate on every mesh dim"
            )
        weight = platform.as_local(weight)
    if platform.shape(weight) != (layout.shape[class_dim],):
        raise LossParallelLayoutError(
            f"the class weights have shape {platform.shape(weight)}; expected ({layout.shape[class_dim]},), the "
            "weights of all classes"
        )
    if platform.dtype_name(weight) not in _FLOATS:
        raise TypeError(
            f"the class weights are {platform.dtype_name(weight)}; expected a floating dtype ({', '.join(_FLOATS)})"
        )
    if platform.requires_grad(weight):
        raise LossParallelUnsupportedError("the loss is not differentiable in the class weights; detach them")
    if platform.device_type(weight) != platform.device_type(call.input):
        raise LossParallelLayoutError(
            f"the class weights are on {platform.device_type(weight)!r}, the logits on "
            f"{platform.device_type(call.input)!r}; expected the same device"
        )
    return weight
