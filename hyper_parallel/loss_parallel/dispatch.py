"""From a cross-entropy call on DTensors to the kernels: checks, layouts, reductions. Knows no framework.

Placements: logits ``S(class)@tp`` (and ``S(token dim)@dp`` where tokens are sharded), target replicated on tp
-> per-token loss lies like the target, ``sum`` and ``mean`` are replicated everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.native import from_native, to_native
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.core.redistribute import redistribute_local
from hyper_parallel.core.state import State, current_state
from hyper_parallel.errors import LossParallelLayoutError, UnsupportedOperatorError
from hyper_parallel.loss_parallel.agreed import agreed, shared_text
from hyper_parallel.loss_parallel.agreement import View, agree
from hyper_parallel.loss_parallel.inputs import LossInputs, prepare
from hyper_parallel.loss_parallel.op_names import loss_kind
from hyper_parallel.loss_parallel.uncomputed import UncomputedLogits
from hyper_parallel.loss_parallel.uncomputed_loss import uncomputed_cross_entropy
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.platform import LossArguments, Tensor

__all__ = ["dispatch_loss_parallel", "intercept_native"]

_opaque = get_platform().opaque


def dispatch_loss_parallel(
    name: str, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Compute a cross-entropy family call on DTensors, or return NotImplemented to leave it to layout inference.

    Raises:
        LossParallelLayoutError: the logits, target or weight lie otherwise than needed, or ranks disagree.
        LossParallelUnsupportedError: label smoothing, probability targets.
        IndexError: a target outside ``[0, C)``.
    """
    kind = loss_kind(name)
    if kind is None:
        return NotImplemented
    platform, state = get_platform(), _loss_state()
    try:
        call = platform.bind_loss_arguments(kind, op_call, args, kwargs)
    except TypeError as error:
        _refuse_together(kind, error, args, kwargs, state)
        raise
    logits = call.input
    if isinstance(logits, UncomputedLogits):
        return uncomputed_cross_entropy(call, state) if kind == "cross_entropy" else NotImplemented
    if kind == "log_softmax":
        if isinstance(logits, DTensor) and not state.loss_parallel:
            return _log_softmax_outside(call, state, op_call, args, kwargs)
        return _log_softmax(call, state)
    if not isinstance(logits, DTensor):
        return _plain_logits(call, op_call, args, kwargs)
    if not state.loss_parallel:
        if _nothing_sharded(call):
            return NotImplemented
        return _outside(call, state)
    return _inside(call, state)


@_opaque
def intercept_native(name: str, op_call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same for the framework's own distributed tensors; the result is one of these again."""
    if not _loss_state().loss_parallel:
        return NotImplemented
    platform = get_platform()
    mixed = any(platform.is_tensor(x) and not platform.is_native_dtensor(x) for x in (*args, *kwargs.values()))

    def convert(x: Any) -> Any:
        return from_native(x) if platform.is_native_dtensor(x) else x

    ours, our_kwargs = [convert(a) for a in args], {k: convert(v) for k, v in kwargs.items()}
    result = dispatch_loss_parallel(name, op_call, ours, our_kwargs)
    if result is NotImplemented and mixed:  # the framework's operators do not take plain tensors beside its own
        result = op_call(*ours, **our_kwargs)
    return to_native(result) if isinstance(result, DTensor) else result


def _loss_state() -> State:
    """The state; of a forward pass that activation checkpointing repeats in backward, on: the first time it was legal.

    Then ``backward()`` may run outside the context, or in a thread of the framework's that does not see it.
    """
    state = current_state()
    if not state.loss_parallel and get_platform().in_backward():
        state = replace(state, loss_parallel=True, strict=False, mesh=None)
    return state


def _refuse_together(
    kind: str, error: TypeError, args: Sequence[Any], kwargs: Mapping[str, Any], state: State
) -> None:
    """Of arguments that do not fit the function the ranks that wait in the agreement must hear."""
    logits = next((x for x in (*args, *kwargs.values()) if isinstance(x, DTensor)), None)
    if logits is None or not state.loss_parallel:
        return

    def fail() -> None:
        raise error

    agreed(LossArguments(kind, logits), get_platform().as_local(logits), fail)


# -- the three places a call can be in ------------------------------------------------------------------------------


def _inside(call: LossArguments, state: State) -> Any:
    local = get_platform().as_local(call.input)
    if _nothing_sharded(call) and not (state.mesh is not None and state.strict):
        inputs = agreed(call, local, lambda: None)
    else:
        may_gather = not state.strict or state.config.loss_parallel_fallback_on_layout_error
        inputs = agreed(call, local, lambda: prepare(call, mesh=state.mesh, may_gather=may_gather))
    return NotImplemented if inputs is None else _compute(call, inputs)


def _outside(call: LossArguments, state: State) -> Any:
    layout: Layout = call.input.global_layout
    if not state.config.loss_parallel_fallback_on_layout_error:
        raise LossParallelLayoutError(
            f"{call.kind} outside loss_parallel(): found logits with {layout.describe()}, expected replicated logits. "
            "Enter loss_parallel(), redistribute the logits to Replicate, or set "
            "ParallelismConfig.loss_parallel_fallback_on_layout_error"
        )
    local = get_platform().as_local(call.input)
    inputs = agreed(call, local, lambda: prepare(call, mesh=None, may_gather=True, must_gather=True))
    assert inputs is not None
    return _compute(call, inputs)


def _plain_logits(
    call: LossArguments, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Plain logits beside a DTensor target or weight: fine where these are replicated."""
    for name, x in (("target", call.target), ("weight", call.weight)):
        if isinstance(x, DTensor) and not x.global_layout.is_replicated:
            raise LossParallelLayoutError(
                f"{call.kind}: the logits are a plain tensor and the {name} has {x.global_layout.describe()}; expected "
                f"a replicated {name}, or logits as a DTensor"
            )
    return get_platform().call_local(op_call, args, kwargs)


def _nothing_sharded(call: LossArguments) -> bool:
    tensors = [x for x in (call.input, call.target, call.weight) if isinstance(x, DTensor)]
    return all(x.global_layout.is_replicated for x in tensors)


# -- computation ----------------------------------------------------------------------------------------------------


def _compute(call: LossArguments, inputs: LossInputs) -> DTensor:
    platform = get_platform()
    if inputs.warning is not None:
        warnings.warn(inputs.warning, stacklevel=2)
    local = redistribute_local(platform.as_local(call.input), inputs.layout, inputs.compute_layout)
    options = LossOptions(ignore_index=call.ignore_index, validate=False)
    kernel = platform.loss_kernels.cross_entropy if call.kind == "cross_entropy" else platform.loss_kernels.nll_loss
    shard = _class_shard(inputs.compute_layout, inputs.class_dim, inputs.class_mesh_dim)
    loss, token_weight = kernel(local, inputs.class_dim, inputs.target, shard, inputs.weight, options)
    if call.reduction == "none":
        result: DTensor = platform.as_dtensor(DTensor, loss, inputs.token_layout)
        return result
    total = _reduce(call.reduction, loss, token_weight, inputs)
    scalar = Layout(inputs.layout.mesh, [Replicate()] * inputs.layout.mesh.ndim, ())
    result = platform.as_dtensor(DTensor, total, scalar)
    return result


def _class_shard(layout: Layout, class_dim: int, class_mesh_dim: int | None) -> ClassShard:
    group = None if class_mesh_dim is None else layout.mesh.get_group(class_mesh_dim)
    return ClassShard.of(layout.shape[class_dim], group)


def _reduce(reduction: str, loss: Tensor, token_weight: Tensor, inputs: LossInputs) -> Tensor:
    """Sum or mean over the tokens of all ranks: every mesh dim that shards tokens is reduced once."""
    platform = get_platform()
    mesh = inputs.layout.mesh
    sums = [platform.sum_tokens(loss)]
    if reduction == "mean":
        sums.append(platform.sum_tokens(token_weight))
    if inputs.token_mesh_dims:
        packed = platform.stack(sums)
        partial = [Partial() if d in inputs.token_mesh_dims else Replicate() for d in range(mesh.ndim)]
        source = Layout(mesh, partial, (len(sums),))
        packed = redistribute_local(packed, source, source.gradient_layout)
        sums = [platform.reshape(platform.narrow(packed, 0, i, 1), ()) for i in range(len(sums))]
    return sums[0] if reduction == "sum" else platform.divide(sums[0], sums[1])


def _log_softmax(call: LossArguments, state: State) -> Any:
    """K1 where the dim is sharded on one mesh dim; everything else is layout inference's.

    All agree first, however their logits lie: one rank's may be replicated, or Partial, where another's are sharded.
    """
    platform, x = get_platform(), call.input
    if not isinstance(x, DTensor) or not state.loss_parallel:
        return NotImplemented
    layout: Layout = x.global_layout
    error: Exception | None = None
    mesh_dims: tuple[int, ...] = ()
    dim = call.dim or 0
    if layout.ndim and call.dim is not None:
        if -layout.ndim <= dim < layout.ndim:
            dim %= layout.ndim
            mesh_dims = () if layout.is_replicated else layout.tensor_map[dim]
        else:
            error = IndexError(f"log_softmax over dim {dim} of a tensor of shape {layout.shape}")
    if mesh_dims and (len(mesh_dims) > 1 or layout.has_partial):
        error = LossParallelLayoutError(
            f"log_softmax over dim {dim}: found {layout.describe()}; expected Shard({dim}) on exactly one mesh dim "
            "and no Partial"
        )
    local = platform.as_local(x)
    if platform.loss_kernels.validates_by_default(local):
        error = agree(View(error, shared_text(call, layout)), layout.mesh, local)
    if error is not None:
        raise error
    if not mesh_dims:
        return NotImplemented
    shard = _class_shard(layout, dim, mesh_dims[0])
    result = platform.loss_kernels.log_softmax(local, dim, shard, dtype=call.dtype, validate=False)
    return platform.as_dtensor(DTensor, result, layout)


def _log_softmax_outside(
    call: LossArguments, state: State, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Over a sharded dim: gathered where the configuration allows it, else an error. The rest is layout inference's."""
    x: DTensor = call.input
    layout = x.global_layout
    if call.dim is None or not -layout.ndim <= call.dim < layout.ndim:
        return NotImplemented
    if all(layout.mesh.shape[d] == 1 for d in layout.tensor_map[call.dim]):
        return NotImplemented
    if not state.config.loss_parallel_fallback_on_layout_error:
        raise UnsupportedOperatorError(
            f"log_softmax over sharded dim {call.dim % layout.ndim} of {layout.describe()} outside loss_parallel(). "
            "Enter it, redistribute to Replicate, or set ParallelismConfig.loss_parallel_fallback_on_layout_error"
        )
    warnings.warn(
        f"log_softmax over a sharded dim outside loss_parallel(), of {layout.describe()}; gathering it, which is slow",
        stacklevel=2,
    )
    whole = [Replicate() if p.is_shard(call.dim % layout.ndim) else p for p in layout.placements]
    gathered = x.redistribute(placements=whole)
    new_kwargs = {k: gathered if v is x else v for k, v in kwargs.items()}
    return op_call(*[gathered if a is x else a for a in args], **new_kwargs)
