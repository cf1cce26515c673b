"""What :func:`linear_cross_entropy` checks, and how it finds out which rows of the weight a rank holds."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.errors import LossParallelLayoutError
from hyper_parallel.loss_parallel.functional_agreement import Seen, settle_shard, validates
from hyper_parallel.loss_parallel.functional_checks import check_reduction, check_tensors
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.call_check import option_error, range_error
from hyper_parallel.platform.functional import LinearLoss
from hyper_parallel.platform.loss_kernels import ClassShard
from hyper_parallel.platform.platform import Tensor

__all__ = ["settle_linear"]


def settle_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: LinearLoss, num_classes: int | None
) -> LinearLoss:
    """``loss`` with the classes of this rank, for a call that all ranks have found right.

    Collectives and errors: those of :func:`settle_shard`, with what :func:`linear_cross_entropy` names.
    """
    platform, group, options = get_platform(), loss.shard.group, loss.options
    validate = validates(options.validate, weight, hidden, target)

    def look(shard: ClassShard | None) -> Seen:
        check_reduction(loss.reduction)
        check_tensors(hidden=hidden, weight_shard=weight, target=target, **({} if bias is None else {"bias": bias}))
        _check(hidden, weight, bias, target, loss)
        _check_tokens(hidden, target, loss.sequence_dim, group)
        shape = platform.shape(weight)
        if shard is not None and shape[0] != shard.stop - shard.start:
            raise LossParallelLayoutError(
                f"the weight has shape {shape}; expected {shard.stop - shard.start} rows, those of classes "
                f"[{shard.start}, {shard.stop}) of {shard.num_classes}"
            )
        if not validate:
            return Seen(shape[0])
        if shard is not None:
            check(shard)
        shared = {
            "the operation": "linear_cross_entropy",
            "the shape of the target": platform.shape(target),
            "the digest of the target's values": platform.loss_kernels.target_values(target, 0, 0)[0],
            "the dtype of the hidden states": platform.dtype_name(hidden),
            "the width of the hidden states": platform.shape(hidden)[-1],
            "the dtype of the weight": platform.dtype_name(weight),
            "whether there is a bias": bias is not None,
            "reduction": loss.reduction,
            "ignore_index": options.ignore_index,
            "label_smoothing": options.label_smoothing,
            "z_loss": options.z_loss,
            "softcap": loss.softcap,
            "chunk_size": loss.chunk_size,
            "the dim of sequence parallelism": loss.sequence_dim,
        }
        return Seen(shape[0], shared, check)

    def check(shard: ClassShard) -> None:
        if not validate:
            return
        _, count, first = platform.loss_kernels.target_values(target, shard.num_classes, options.ignore_index)
        error = range_error(count, first, shard.num_classes, options.ignore_index)
        if error is not None:
            raise error

    shard = settle_shard(look, group, num_classes, weight, validate)
    return replace(loss, shard=shard, options=replace(options, validate=False))


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: LinearLoss) -> None:
    """Shapes, dtypes and numbers that this rank sees.

    Raises:
        LossParallelLayoutError, TypeError, ValueError: what is wrong.
    """
    platform = get_platform()
    shape = platform.shape(weight)
    width = platform.shape(hidden)[-1:]
    if len(shape) != 2 or shape[1:] != width:
        raise LossParallelLayoutError(
            f"the hidden states have shape {platform.shape(hidden)} and the weight {shape}; expected [..., H] and "
            "[V_local, H]"
        )
    if bias is not None and platform.shape(bias) != shape[:1]:
        raise LossParallelLayoutError(f"the bias has shape {platform.shape(bias)}; expected {shape[:1]}")
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if not all(platform.is_floating_point(x) for x in tensors) or platform.is_floating_point(target):
        raise TypeError(
            f"found dtypes {[platform.dtype_name(x) for x in tensors]} and a {platform.dtype_name(target)} target; "
            "expected floating ones and an integer target"
        )
    problem = option_error(loss.options.label_smoothing, loss.options.z_loss)
    if problem is not None:
        raise problem
    if loss.softcap is not None and not loss.softcap > 0:
        raise ValueError(f"softcap is {loss.softcap}; expected a positive number or None")
    if loss.chunk_size is not None and loss.chunk_size < 1:
        raise ValueError(f"chunk_size is {loss.chunk_size}; expected at least 1 or None")


def _check_tokens(hidden: Tensor, target: Tensor, dim: int | None, group: Group | None) -> None:
    """The target has the tokens of the hidden states, or of all their pieces.

    Raises:
        LossParallelLayoutError: it has not.
    """
    platform = get_platform()
    tokens, wanted = platform.shape(hidden)[:-1], platform.shape(target)
    if dim is not None and group is not None:
        if not 0 <= dim < len(wanted):
            raise LossParallelLayoutError(f"sequence_dim is {dim}; expected a dim of the target, of shape {wanted}")
        start, stop = chunk_ranges(wanted[dim], group.size)[group.rank]
        wanted = (*wanted[:dim], stop - start, *wanted[dim + 1 :])
    if tokens != wanted:
        raise LossParallelLayoutError(
            f"the hidden states have shape {platform.shape(hidden)} and the target {platform.shape(target)}; "
            f"expected hidden states of shape {(*wanted, platform.shape(hidden)[-1])}"
        )
