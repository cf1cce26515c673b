"""Last layer and loss as operators that ``torch.compile`` takes into its graph; see ``_loss_ops``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.functional import LinearLoss
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.torch._linear_loss import autocast_inputs, compute, gradients_again, sum_hidden
from hyper_parallel.platform.torch._loss_ops import group_by_name, group_name, operator_name

__all__ = ["linear_loss"]

_SETTINGS = (
    "str group, int num_classes, int ignore_index, float label_smoothing, float z_loss, str reduction, "
    "float? softcap, int? chunk_size, int? sequence_dim, bool? validate, bool[] needs"
)


def linear_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, loss: LinearLoss
) -> torch.Tensor:
    """:meth:`LossFunctions.linear_loss` by way of the operators."""
    hidden, weight, needs = autocast_inputs(hidden, weight, bias)
    options = loss.options
    settings = (
        *(group_name(loss.shard.group), loss.shard.num_classes, options.ignore_index, options.label_smoothing),
        *(options.z_loss, loss.reduction, loss.softcap, loss.chunk_size, loss.sequence_dim),
        *(options.validate, needs),
    )
    result: torch.Tensor = _forward(hidden, weight, bias, target, *settings)[0]
    return result


def _loss_of(settings: tuple[Any, ...]) -> tuple[LinearLoss, Sequence[bool]]:
    name, classes, ignore_index, smoothing, z_loss, reduction, softcap, chunk_size, sequence_dim = settings[:9]
    validate, needs = settings[9:]
    shard = ClassShard.of(classes, group_by_name(name))
    options = LossOptions(ignore_index, smoothing, z_loss, True, validate)
    return LinearLoss(shard, options, reduction, softcap, chunk_size, sequence_dim), needs


@torch.library.custom_op(
    operator_name("linear_cross_entropy", __file__),
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, ...]:
    """The loss and the gradients of hidden states, weight and bias, empty where there are none yet."""
    # Which classes a rank holds is settled when the operator runs, by the layer that eager calls come from.
    from hyper_parallel.loss_parallel.linear_checks import settle_linear

    asked, needs = _loss_of(settings)
    loss = settle_linear(hidden, weight, bias, target, asked, asked.shard.num_classes)
    result, grads = compute(hidden, weight, bias, target, loss, needs)
    found = (None, None, None) if grads is None else (grads.hidden, grads.weight, grads.bias)
    return (result, *(result.new_empty(0) if x is None else x for x in found))


@_forward.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, ...]:
    reduction, needs = settings[5], settings[-1]
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    shapes: list[Any] = [
        (target.numel(), hidden.shape[-1]),
        weight.shape,
        (0,) if bias is None else bias.shape,
    ]
    known = [shape if need and reduction != "none" else (0,) for shape, need in zip(shapes, needs)]
    result = target.shape if reduction == "none" else ()
    return tuple(hidden.new_empty(shape, dtype=wide) for shape in (result, *known))


@torch.library.custom_op(
    operator_name("linear_cross_entropy_backward", __file__),
    mutates_args=(),
    schema="(Tensor upstream, Tensor[] grads, Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    upstream: torch.Tensor,
    grads: list[torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients scaled, or computed where the upstream gradient is one a token; summed over the ranks."""
    loss, needs = _loss_of(settings)
    if loss.reduction == "none":
        again = gradients_again(upstream, hidden, weight, bias, target, loss, needs)
        found = [again.hidden, again.weight, again.bias]
    else:
        found = [grad * upstream if need else None for grad, need in zip(grads, needs)]
    results = []
    for grad, like in zip(found, (hidden, weight, bias)):
        if grad is None or like is None:
            results.append(upstream.new_empty(0))
        else:
            results.append(sum_hidden(grad, hidden, target, loss) if like is hidden else grad.to(like.dtype))
    return tuple(x.clone() if any(x is g for g in grads) else x for x in results)


@_backward.register_fake
def _(
    upstream: torch.Tensor,
    grads: list[torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    inputs = zip((hidden, weight, bias), settings[-1])
    return tuple(
        x.new_empty(x.shape) if x is not None and need else upstream.new_empty(0) for x, need in inputs
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.settings = inputs[4:]


def _gradient(ctx: Any, upstream: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    hidden, weight, bias, target, *grads = ctx.saved_tensors
    found = _backward(upstream, grads, hidden, weight, bias, target, *ctx.settings)
    needs = ctx.settings[-1]
    return *(x if need else None for x, need in zip(found, needs)), *[None] * 12


_forward.register_autograd(_gradient, setup_context=_setup)
