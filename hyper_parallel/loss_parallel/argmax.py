"""The most likely classes, when the classes are cut over the ranks: nothing of size V is sent."""

from __future__ import annotations

from operator import index
from typing import Any

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.errors import LossParallelLayoutError
from hyper_parallel.loss_parallel.functional_agreement import Seen, settle_shard, validates
from hyper_parallel.loss_parallel.functional_checks import check_tensors, group_of
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.functional import get_loss_functions
from hyper_parallel.platform.loss_kernels import ClassShard
from hyper_parallel.platform.platform import Tensor

__all__ = ["vocab_parallel_argmax", "vocab_parallel_topk"]


@get_platform().uncaptured
def vocab_parallel_argmax(
    local_logits: Tensor, group: Any, *, num_classes: int | None = None, validate: bool | None = None
) -> Tensor:
    """The class of the largest logit, as ``argmax(-1)`` of all the logits: among equals the lowest class.

    Args:
        local_logits: ``[..., V_local]``, cut as ``torch.chunk`` does. NaN counts as largest.
        group: the ranks that share the classes, see :func:`vocab_parallel_cross_entropy`.
        num_classes: V; None: found out from the ranks first.
        validate: agree with the other ranks on the arguments first, so that what one rank finds wrong is the same error
            on every rank. None: on CPU only.

    Returns:
        ``[...]`` int64, equal on all ranks; not differentiable.

    Collectives:
        One all-gather of a logit a token and one of 8 bytes a token. Before them, validating, one of a header of 24
        bytes a rank; else, without ``num_classes``, one of 8.

    Raises:
        LossParallelLayoutError: no class at all, or not cut as ``torch.chunk`` does.

    Example:
        >>> import torch
        >>> from hyper_parallel import vocab_parallel_argmax
        >>> vocab_parallel_argmax(torch.tensor([[0.0, 2.0, 2.0]]), None)
        tensor([1])
    """
    _, classes = _topk(local_logits, 1, group_of(group), num_classes, "vocab_parallel_argmax", validate)
    shape = get_platform().shape(classes)
    return get_platform().reshape(classes, shape[:-1])


@get_platform().uncaptured
def vocab_parallel_topk(
    local_logits: Tensor,
    k: int,
    group: Any,
    *,
    num_classes: int | None = None,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits in descending order and their classes, as ``torch.topk`` of all the logits.

    Among equals the lowest class comes first, where ``torch.topk`` leaves the order open (on accelerators of MindSpore
    its operator's order stands).

    Args:
        local_logits: ``[..., V_local]``, cut as ``torch.chunk`` does. NaN counts as largest.
        k: how many, equal on all ranks.
        group, num_classes, validate: as in :func:`vocab_parallel_argmax`.

    Returns:
        Values ``[..., k]`` in the logits' dtype and classes ``[..., k]`` int64, equal on all ranks; not differentiable.

    Collectives:
        One all-gather of at most k logits a token and one of 8 bytes for each. Before them what
        :func:`vocab_parallel_argmax` says.

    Raises:
        ValueError: k is negative or larger than V.
        LossParallelLayoutError: not cut as ``torch.chunk`` does.

    Example:
        >>> import torch
        >>> from hyper_parallel import vocab_parallel_topk
        >>> values, classes = vocab_parallel_topk(torch.tensor([0.5, 2.0, 1.0]), 2, None)
        >>> classes
        tensor([1, 2])
    """
    return _topk(local_logits, k, group_of(group), num_classes, "vocab_parallel_topk", validate)


def _topk(
    x: Tensor, k: int, group: Group | None, num_classes: int | None, name: str, validate: bool | None
) -> tuple[Tensor, Tensor]:
    platform, functions = get_platform(), get_loss_functions()
    shard = _settle(x, k, group, num_classes, name, validates(validate, x))
    shape = platform.shape(x)
    values, classes = functions.largest(platform.detach(x), min(k, shape[-1]))
    classes = classes + shard.start
    if group is None or group.size == 1:
        return values, classes
    # a rank's best stand in the order of classes where they are equal, and so do the ranks
    sizes = [min(k, stop - start) for start, stop in chunk_ranges(shard.num_classes, group.size)]
    last = len(shape) - 1
    values = platform.all_gather_uneven(values, last, sizes, group)
    classes = platform.all_gather_uneven(classes, last, sizes, group)
    values, place = functions.largest(values, k)
    return values, functions.take(classes, place)


def _settle(x: Tensor, k: int, group: Group | None, num_classes: int | None, name: str, validate: bool) -> ClassShard:
    """The classes of this rank, the call once checked."""
    platform = get_platform()

    def look(shard: ClassShard | None) -> Seen:
        check_tensors(local_logits=x)
        shape = platform.shape(x)
        if not shape or not platform.is_floating_point(x):
            raise LossParallelLayoutError(
                f"{name}: found {platform.dtype_name(x)} logits of shape {shape}; expected floating ones, at least 1-D"
            )
        if shard is not None and shape[-1] != shard.stop - shard.start:
            raise LossParallelLayoutError(
                f"{name}: found {shape[-1]} classes (shape {shape}); expected {shard.stop - shard.start}, the classes "
                f"[{shard.start}, {shard.stop}) of {shard.num_classes}"
            )
        if shard is not None:
            check(shard)
        shared = {
            "the operation": name,
            "the logits' dtype": platform.dtype_name(x),
            "the shape of the logits without the class dim": shape[:-1],
            "k": index(k),
        }
        return Seen(shape[-1], shared, check)

    def check(shard: ClassShard) -> None:
        if not 0 <= k <= shard.num_classes or (name == "vocab_parallel_argmax" and shard.num_classes == 0):
            raise ValueError(f"{name}: found k={k} and {shard.num_classes} classes; expected at least k classes")

    return settle_shard(look, group, num_classes, x, validate)
