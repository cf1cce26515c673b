"""Last layer and loss as a node of PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform.functional import LinearLoss
from hyper_parallel.platform.torch._linear_chunks import Gradients, run_chunks
from hyper_parallel.platform.torch._loss_rows import autocast_off
from hyper_parallel.platform.torch.collectives import all_gather_uneven, all_reduce, reduce_scatter_uneven
from hyper_parallel.platform.torch.custom_grad import differentiable_once

__all__ = ["autocast_inputs", "compute", "gradients_again", "linear_loss", "sum_hidden"]


def linear_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, loss: LinearLoss
) -> torch.Tensor:
    """See :meth:`LossFunctions.linear_loss`."""
    hidden, weight, needs = autocast_inputs(hidden, weight, bias)
    result: torch.Tensor = _LinearLoss.apply(hidden, weight, bias, target, loss, needs)
    return result


def autocast_inputs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Hidden states and weight in the dtype of the product, and which of the three need a gradient."""
    if torch.is_autocast_enabled(hidden.device.type):  # what autocast does with a linear layer
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    recorded = torch.is_grad_enabled()
    return hidden, weight, [x is not None and x.requires_grad and recorded for x in (hidden, weight, bias)]


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: LinearLoss,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, Gradients | None]:
    """The loss and, where the factor of a token's loss is known, the gradients."""
    with torch.no_grad(), autocast_off(hidden):
        rows, labels = _tokens_first(hidden, target, loss)
        factor = into = None
        if loss.reduction != "none":
            factor = _factor(labels, loss, rows)
            into = Gradients.zeros(rows, weight, bias, needs) if any(needs) else None
        losses = run_chunks(rows, weight, bias, labels, loss, factor, into)
        if factor is None:
            shape = _moved(target, loss).shape
            return _moved_back(losses.view(shape), loss).contiguous(), None
        total = losses.sum()
        return (total * factor[:1].sum() if len(losses) else total / 0.0 if loss.reduction == "mean" else total), into


def gradients_again(
    upstream: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: LinearLoss,
    needs: Sequence[bool],
) -> Gradients:
    """The gradients for any upstream gradient, by computing the logits once more."""
    with torch.no_grad(), autocast_off(hidden):
        rows, labels = _tokens_first(hidden, target, loss)
        if loss.reduction == "none":
            factor = _moved(upstream, loss).reshape(-1)
        else:
            factor = _factor(labels, loss, rows) * upstream
        into = Gradients.zeros(rows, weight, bias, needs)
        run_chunks(rows, weight, bias, labels, loss, factor, into)
        return into


def sum_hidden(grad: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor, loss: LinearLoss) -> torch.Tensor:
    """The ranks' terms of the gradient of ``hidden`` summed, in its shape and dtype."""
    group, dim = loss.shard.group, loss.sequence_dim
    shape = _moved(target, loss).shape
    grad = grad.view(*shape, grad.shape[-1])
    if group is not None and group.size > 1:
        if dim is None:
            grad = all_reduce(grad, "sum", group)
        else:
            grad = reduce_scatter_uneven(grad, 0, _pieces(target, loss), group)
    return _moved_back(grad, loss).to(hidden.dtype)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        loss: LinearLoss,
        needs: Sequence[bool],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.loss, ctx.needs = loss, needs
        result, ctx.grads = compute(hidden, weight, bias, target, loss, ctx.needs)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        grads, ctx.grads = ctx.grads, None
        with torch.no_grad():
            if grads is None:
                grads = gradients_again(upstream, hidden, weight, bias, target, ctx.loss, ctx.needs)
            elif upstream.device.type != "cpu" or upstream.item() != 1.0:  # nobody else has seen them
                for grad in (grads.hidden, grads.weight, grads.bias):
                    if grad is not None:
                        grad.mul_(upstream)
            found = (
                None if grads.hidden is None else sum_hidden(grads.hidden, hidden, target, ctx.loss),
                None if grads.weight is None else grads.weight.to(weight.dtype),
                None if grads.bias is None else grads.bias.to(bias.dtype),
            )
        given = [x for x in (upstream, hidden, weight, bias) if x is not None]
        once = (None if g is None else differentiable_once("linear_cross_entropy", g, *given) for g in found)
        return *once, None, None, None


def _factor(labels: torch.Tensor, loss: LinearLoss, rows: torch.Tensor) -> torch.Tensor:
    """What each token's loss is multiplied with in the result."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if loss.reduction == "sum":
        return torch.ones(labels.shape, dtype=dtype, device=labels.device)
    return (labels != loss.options.ignore_index).sum().to(dtype).reciprocal().expand(labels.shape)


def _tokens_first(
    hidden: torch.Tensor, target: torch.Tensor, loss: LinearLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, H]`` and ``[T]``; gathered where the ranks hold pieces."""
    hidden = _moved(hidden, loss)
    group = loss.shard.group
    if loss.sequence_dim is not None and group is not None:
        hidden = all_gather_uneven(hidden, 0, _pieces(target, loss), group)
    return hidden.reshape(target.numel(), hidden.shape[-1]), _moved(target, loss).reshape(-1)


def _pieces(target: torch.Tensor, loss: LinearLoss) -> list[int]:
    assert loss.sequence_dim is not None and loss.shard.group is not None
    return [stop - start for start, stop in chunk_ranges(target.shape[loss.sequence_dim], loss.shard.group.size)]


def _moved(x: torch.Tensor, loss: LinearLoss) -> torch.Tensor:
    """With the dim that is cut in front."""
    return x if not loss.sequence_dim else x.movedim(loss.sequence_dim, 0)


def _moved_back(x: torch.Tensor, loss: LinearLoss) -> torch.Tensor:
    return x if not loss.sequence_dim else x.movedim(0, loss.sequence_dim)
