"""The last layer and its loss in one function: the logits are never there as a whole."""

from __future__ import annotations

from typing import Any

from hyper_parallel.loss_parallel.functional_checks import group_of
from hyper_parallel.loss_parallel.linear_checks import settle_linear
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.functional import LinearLoss, get_loss_functions
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.platform import Tensor

__all__ = ["linear_cross_entropy"]

_functions = get_loss_functions()  # not looked up inside what a compiler traces


@get_platform().uncaptured
def linear_cross_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    group: Any,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    num_classes: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    validate: bool | None = None,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias``, the rows of the weight cut over ``group``; equal to one device's.

    Some tokens at a time, their logits are computed, turned into the loss and into their own gradient, and that into
    the gradients of ``hidden`` and the weight; then the memory serves the next tokens. With ``"sum"`` and ``"mean"``
    all of this runs in the forward pass, as the factor of a token's loss is known from the target: three matrix
    products as without fusing, and backward only scales. With ``"none"``, or a second backward, the logits are computed
    again. Without gradients (``no_grad``) the forward pass computes the loss alone.

    Args:
        hidden: ``[..., H]``, any floating dtype; equal on all ranks of the group.
        weight_shard: ``[V_local, H]``: this rank's rows, cut as ``torch.chunk`` does.
        target: ``[...]``, integers, equal on all ranks of the group.
        group: the ranks that share the classes, see :func:`vocab_parallel_cross_entropy`; None: this one alone.
        bias: ``[V_local]``.
        softcap: c of ``logits = c tanh(logits / c)``.
        num_classes: V; None: found out from the ranks first (not under ``torch.compile``).
        ignore_index, reduction, label_smoothing, z_loss: as in :func:`vocab_parallel_cross_entropy`.
        chunk_size: tokens at a time, equal on all ranks; None: an eighth, of at most 64 MiB of logits in fp32 on CPU,
            512 MiB elsewhere, but 64 tokens if there are.
        sequence_parallel: ``hidden`` is cut over the ranks along ``sequence_dim``, as ``torch.chunk`` does; ``target``
            is whole. It is gathered, and its gradient reduce-scattered.
        sequence_dim: the dim to gather along.
        validate: as in :func:`vocab_parallel_cross_entropy`: agree with the other ranks on the arguments and look at
            the targets first. None: on CPU only.

    Returns:
        The loss (fp32; fp64 for fp64 inputs): a scalar, or ``[...]`` with ``"none"``. Logits of half-precision inputs
        are not rounded in between on CPU; gradients are rounded once.

    Collectives:
        Forward an all-gather of 8 bytes a token (see :func:`vocab_parallel_cross_entropy`) for each chunk; before that
        one of ``hidden`` under sequence parallelism. First of all, validating, an all-gather of a header of 24 bytes a
        rank; else, without ``num_classes``, one of 8. Backward one all-reduce of the gradient of ``hidden`` in fp32, or
        its reduce-scatter.

    Raises:
        LossParallelLayoutError: shapes that do not fit, classes not cut as ``torch.chunk`` does.
        IndexError: a target that is no class, if validating; else it gives NaN.
        TypeError, ValueError: dtypes, option values.

    Example:
        >>> import torch
        >>> from hyper_parallel import linear_cross_entropy
        >>> hidden, weight = torch.eye(2), torch.eye(3, 2).requires_grad_()
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), None)
        >>> round(loss.item(), 4)
        0.5514
    """
    owner = group_of(group)
    dim = sequence_dim if sequence_parallel and owner is not None and owner.size > 1 else None
    options = LossOptions(
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, inplace=True, validate=validate
    )
    if _functions.compiling():
        if num_classes is None:
            raise ValueError("linear_cross_entropy under torch.compile: found num_classes=None; expected their number")
        loss = LinearLoss(ClassShard.of(num_classes, owner), options, reduction, softcap, chunk_size, dim)
    else:
        loss = LinearLoss(ClassShard(0, 0, 0, owner), options, reduction, softcap, chunk_size, dim)
        loss = settle_linear(hidden, weight_shard, bias, target, loss, num_classes)
    return _functions.linear_loss(hidden, weight_shard, bias, target, loss)
