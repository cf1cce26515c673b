"""The last layer and its loss in one function: the logits are never there as a whole."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.errors import LossParallelLayoutError
from hyper_parallel.loss_parallel.functional_checks import check_reduction, find_shard, group_of
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.functional import LinearLoss, get_loss_functions
from hyper_parallel.platform.loss_kernels import LossOptions
from hyper_parallel.platform.platform import Tensor

__all__ = ["linear_cross_entropy"]

_platform, _functions = get_platform(), get_loss_functions()  # not looked up inside what a compiler traces


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
        target: ``[...]``, integers, equal on all ranks. One outside ``[0, V)`` gives NaN.
        group: the ranks that share the classes, see :func:`vocab_parallel_cross_entropy`; None: this one alone.
        bias: ``[V_local]``.
        softcap: c of ``logits = c tanh(logits / c)``.
        num_classes: V; None: found out by an all-gather of 8 bytes a rank first (not under ``torch.compile``).
        ignore_index, reduction, label_smoothing, z_loss: as in :func:`vocab_parallel_cross_entropy`.
        chunk_size: tokens at a time, equal on all ranks; None: an eighth, of at most 64 MiB of logits in fp32 on CPU,
            512 MiB elsewhere, but 64 tokens if there are.
        sequence_parallel: ``hidden`` is cut over the ranks along ``sequence_dim``, as ``torch.chunk`` does; ``target``
            is whole. It is gathered, and its gradient reduce-scattered.
        sequence_dim: the dim to gather along.

    Returns:
        The loss (fp32; fp64 for fp64 inputs): a scalar, or ``[...]`` with ``"none"``. Logits of half-precision inputs
        are not rounded in between on CPU; gradients are rounded once.

    Collectives:
        Forward an all-gather of 8 bytes a token (see :func:`vocab_parallel_cross_entropy`) for each chunk; before that
        one of ``hidden`` under sequence parallelism. Backward one all-reduce of the gradient of ``hidden`` in fp32, or
        its reduce-scatter.

    Raises:
        LossParallelLayoutError: shapes that do not fit.
        TypeError, ValueError: dtypes, option values.

    Example:
        >>> import torch
        >>> from hyper_parallel import linear_cross_entropy
        >>> hidden, weight = torch.eye(2), torch.eye(3, 2).requires_grad_()
        >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), None)
        >>> round(loss.item(), 4)
        0.5514
    """
    check_reduction(reduction)
    owner = group_of(group)
    _check(hidden, weight_shard, bias, target, softcap, chunk_size)
    dim = sequence_dim if sequence_parallel and owner is not None and owner.size > 1 else None
    _check_tokens(hidden, target, dim, owner)
    shard = find_shard(_platform.shape(weight_shard)[0], owner, num_classes, weight_shard)
    if _platform.shape(weight_shard)[0] != shard.stop - shard.start:
        raise LossParallelLayoutError(
            f"the weight has shape {_platform.shape(weight_shard)}; expected {shard.stop - shard.start} rows, those of "
            f"classes [{shard.start}, {shard.stop}) of {shard.num_classes}"
        )
    options = LossOptions(
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, inplace=True, validate=False
    )
    loss = LinearLoss(shard, options, reduction, softcap, chunk_size, dim)
    return _functions.linear_loss(hidden, weight_shard, bias, target, loss)


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, softcap: float | None, chunk_size: int | None
) -> None:
    """Shapes, dtypes and numbers that this rank sees.

    Raises:
        LossParallelLayoutError, TypeError, ValueError: what is wrong.
    """
    shape = _platform.shape(weight)
    width = _platform.shape(hidden)[-1:]
    if len(shape) != 2 or shape[1:] != width:
        raise LossParallelLayoutError(
            f"the hidden states have shape {_platform.shape(hidden)} and the weight {shape}; expected [..., H] and "
            "[V_local, H]"
        )
    if bias is not None and _platform.shape(bias) != shape[:1]:
        raise LossParallelLayoutError(f"the bias has shape {_platform.shape(bias)}; expected {shape[:1]}")
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if not all(_platform.is_floating_point(x) for x in tensors) or _platform.is_floating_point(target):
        raise TypeError(
            f"found dtypes {[_platform.dtype_name(x) for x in tensors]} and a {_platform.dtype_name(target)} target; "
            "expected floating ones and an integer target"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a positive number or None")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; expected at least 1 or None")


def _check_tokens(hidden: Tensor, target: Tensor, dim: int | None, group: Group | None) -> None:
    """The target has the tokens of the hidden states, or of all their pieces.

    Raises:
        LossParallelLayoutError: it has not.
    """
    tokens, wanted = _platform.shape(hidden)[:-1], _platform.shape(target)
    if dim is not None and group is not None:
        if not 0 <= dim < len(wanted):
            raise LossParallelLayoutError(f"sequence_dim is {dim}; expected a dim of the target, of shape {wanted}")
        start, stop = chunk_ranges(wanted[dim], group.size)[group.rank]
        wanted = (*wanted[:dim], stop - start, *wanted[dim + 1 :])
    if tokens != wanted:
        raise LossParallelLayoutError(
            f"the hidden states have shape {_platform.shape(hidden)} and the target {_platform.shape(target)}; "
            f"expected hidden states of shape {(*wanted, _platform.shape(hidden)[-1])}"
        )
