"""The loss as two operators, which ``torch.compile`` takes into its graph and does not look into.

An operator takes tensors and numbers only: the group comes by its name, and what backward needs of each token goes out
of the first operator and into the second. A vector that an option does without is empty.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions, TokenOutputs
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch._loss_forward import (
    distributed_nll_loss_forward,
    fused_nll_log_softmax_backward,
    log_prob_of,
)
from hyper_parallel.platform.torch._loss_gradients import LossState
from hyper_parallel.platform.torch._loss_rows import statistics_dtype

__all__ = ["group_by_name", "group_name", "operator_name", "token_outputs"]

_ASK = -(2**62)  # for num_classes: None
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss"


def operator_name(name: str, file: str) -> str:
    """A name that changes with the file that defines the operator.

    The compiler's cache on disk, which outlives this version of the library, knows an operator by its name and schema
    alone, and takes the sizes of its results from the version that was there before.
    """
    return f"hyper_parallel::{name}_{zlib.crc32(Path(file).read_bytes()):08x}"


def group_name(group: Group | None) -> str:
    """Empty for one rank alone."""
    return "" if group is None or group.handle is None else str(group.handle.group_name)


def group_by_name(name: str) -> Group | None:
    """The group that :func:`group_name` was given."""
    if not name:
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    return get_platform().adopt_group(_resolve_process_group(name))  # type: ignore[arg-type]


def token_outputs(
    local_logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    group: Group | None,
    num_classes: int | None,
    options: LossOptions,
) -> TokenOutputs:
    """:meth:`LossKernels.token_outputs` by way of the operators."""
    loss, token_weight, log_prob, entropy, *_ = _forward(
        local_logits,
        target,
        weight,
        group_name(group),
        _ASK if num_classes is None else num_classes,
        options.ignore_index,
        options.label_smoothing,
        options.z_loss,
        options.validate,
        options.reduction,
        options.log_probs,
        options.entropy,
        options.overlap_blocks,
    )
    return TokenOutputs(
        loss, token_weight.detach(), log_prob if options.log_probs else None, entropy if options.entropy else None
    )


@torch.library.custom_op(
    operator_name("vocab_cross_entropy", __file__),
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? weight, str group, int num_classes, {_OPTIONS}, bool? validate, "
    f"str reduction, bool log_probs, bool entropy, int overlap_blocks) -> ({', '.join(['Tensor'] * 13)})",
)
def _forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    group: str,
    num_classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    validate: bool | None,
    reduction: str,
    log_probs: bool,
    entropy: bool,
    overlap_blocks: int,
) -> tuple[torch.Tensor, ...]:
    """Loss, token weight, log-probability, entropy; the state; the shard's numbers."""
    # Which classes a rank holds is settled when the operator runs, by the layer that eager calls come from.
    from hyper_parallel.loss_parallel.functional_checks import settle_cross_entropy

    options = LossOptions(
        ignore_index, label_smoothing, z_loss, False, validate, "", log_probs, entropy, overlap_blocks, reduction
    )
    dim = max(logits.ndim - 1, 0)
    said = None if num_classes == _ASK else num_classes
    shard = settle_cross_entropy(logits, target, weight, group_by_name(group), said, options)
    checked = replace(options, validate=False)
    get_platform().loss_kernels._ensure_valid("cross_entropy", logits, dim, target, shard, weight, checked)
    loss, token_weight, state = distributed_nll_loss_forward(logits, dim, target, shard, weight, options)
    empty = state.slope.new_empty(0)

    def some(x: torch.Tensor | None) -> torch.Tensor:
        return empty.clone() if x is None else x

    return (
        loss,
        token_weight,
        log_prob_of(state, target.shape) if log_probs else empty.clone(),
        empty.clone() if state.entropy is None else state.entropy.view(target.shape),
        state.slope,
        state.target_index,
        state.nll,
        state.anchor,
        some(state.smoothing),
        some(state.unit),
        some(state.reference),
        some(state.log_sum_exp),
        torch.tensor([shard.start, shard.stop, shard.num_classes]),
    )


@_forward.register_fake
def _(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    group: str,
    num_classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    validate: bool | None,
    reduction: str,
    log_probs: bool,
    entropy: bool,
    overlap_blocks: int,
) -> tuple[torch.Tensor, ...]:
    dtype = statistics_dtype(logits)

    def shaped(wanted: bool = True) -> torch.Tensor:
        return logits.new_empty(target.shape if wanted else (0,), dtype=dtype)

    def vector(wanted: bool = True, dtype: torch.dtype = dtype) -> torch.Tensor:
        return logits.new_empty((target.numel(),) if wanted else (0,), dtype=dtype)

    smoothing = logits.new_empty(() if label_smoothing else (0,), dtype=dtype)
    return (
        *(shaped(), shaped(), shaped(log_probs), shaped(entropy)),
        *(vector(), vector(dtype=torch.int32), vector(), vector(), smoothing),
        *(vector(log_probs or entropy), vector(entropy), vector(entropy)),
        torch.empty(3, dtype=torch.int64),
    )


@torch.library.custom_op(
    operator_name("vocab_cross_entropy_backward", __file__),
    mutates_args=(),
    schema="(Tensor grad_loss, Tensor grad_log_prob, Tensor grad_entropy, Tensor logits, Tensor? weight, "
    f"Tensor[] state, Tensor shard, {_OPTIONS}, bool log_probs, bool entropy) -> Tensor",
)
def _backward(
    grad_loss: torch.Tensor,
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor,
    logits: torch.Tensor,
    weight: torch.Tensor | None,
    state: list[torch.Tensor],
    shard: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    log_probs: bool,
    entropy: bool,
) -> torch.Tensor:
    """The gradient of the logits."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, False, False, "", log_probs, entropy)
    slope, index, nll, anchor, smoothing, unit, reference, log_sum_exp, own_entropy = state
    found = LossState(
        slope,
        index,
        nll,
        anchor,
        weight,
        smoothing if label_smoothing else None,
        ClassShard(*shard.tolist()),
        options,
        unit if log_probs or entropy else None,
        own_entropy.reshape(-1) if entropy else None,
        reference if entropy else None,
        log_sum_exp if entropy else None,
    )
    return fused_nll_log_softmax_backward(
        grad_loss,
        logits,
        max(logits.ndim - 1, 0),
        found,
        grad_log_prob if log_probs else None,
        grad_entropy if entropy else None,
    )


@_backward.register_fake
def _(
    grad_loss: torch.Tensor, grad_log_prob: torch.Tensor, grad_entropy: torch.Tensor, logits: torch.Tensor, *_: Any
) -> torch.Tensor:
    return torch.empty_like(logits)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, _, weight, _, _, ignore_index, label_smoothing, z_loss, _, _, log_probs, entropy, _ = inputs
    state = (*output[4:12], output[3])
    ctx.save_for_backward(logits, weight, output[12], *state)
    ctx.options = (ignore_index, label_smoothing, z_loss, log_probs, entropy)


def _gradient(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    logits, weight, shard, *state = ctx.saved_tensors
    grad = _backward(grads[0], grads[2], grads[3], logits, weight, state, shard, *ctx.options)
    return grad, *[None] * 12


_forward.register_autograd(_gradient, setup_context=_setup)
