"""What the losses called by name check of their arguments, and how they find out which classes a rank holds."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.process_group import resolve_group
from hyper_parallel.loss_parallel.functional_agreement import Seen, settle_shard, validates
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.call_check import EQUAL_ON_ALL_RANKS, CallFacts, range_error
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.platform import Tensor

__all__ = ["check_reduction", "check_tensors", "group_of", "settle_cross_entropy"]


def check_reduction(reduction: str) -> None:
    """Raise ValueError for an unknown one."""
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction is {reduction!r}; expected 'none', 'sum' or 'mean'")


def check_tensors(**tensors: Any) -> None:
    """Raise TypeError for what is no tensor."""
    for name, x in tensors.items():
        if not get_platform().is_tensor(x):
            raise TypeError(f"{name} must be a tensor, found {type(x).__name__}")


def group_of(group: Any) -> Group | None:
    """What users pass as ``group``, as a group of ours; None for one rank alone."""
    return None if group is None else resolve_group(group)


def settle_cross_entropy(
    local_logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    group: Group | None,
    num_classes: int | None,
    options: LossOptions,
) -> ClassShard:
    """The classes of this rank in a call of ``vocab_parallel_cross_entropy`` that all ranks have found right.

    Collectives and errors: those of :func:`settle_shard`, with what the call's own docstring names.
    """
    platform = get_platform()
    kernels, validate = platform.loss_kernels, validates(options.validate, local_logits, target, weight)

    def facts_of(shard: ClassShard) -> CallFacts:
        dim = max(len(platform.shape(local_logits)) - 1, 0)
        return kernels.facts_of(local_logits, dim, target, shard, weight, options, read_values=validate)

    def range_problem(facts: CallFacts) -> Exception | None:
        return range_error(facts.bad_targets, facts.first_bad_target, facts.num_classes, facts.ignore_index)

    def look(shard: ClassShard | None) -> Seen:
        check_reduction(options.reduction)
        check_tensors(local_logits=local_logits, target=target)
        shape = platform.shape(local_logits)
        width = shape[-1] if shape else 0
        if not validate:
            return Seen(width)  # the kernel looks at shapes and dtypes, on its own
        facts = facts_of(shard or _provisional(width))
        problem = facts.local_problem() or (None if shard is None else range_problem(facts))
        if problem is not None:
            raise problem
        shared = {what: getattr(facts, name) for name, what in EQUAL_ON_ALL_RANKS.items() if name != "num_classes"}
        shared |= {"reduction": options.reduction, "the shape of the class weights": facts.weight_shape}
        shared |= {"return_log_probs": options.log_probs, "return_entropy": options.entropy}
        return Seen(width, shared, check if shard is None else _nothing)

    def _provisional(width: int) -> ClassShard:
        """Before anyone knows V: as many as there are weights."""
        weights = platform.shape(weight) if platform.is_tensor(weight) else ()
        return ClassShard(0, width, max(width, weights[0] if len(weights) == 1 else 0))

    def check(shard: ClassShard) -> None:
        facts = facts_of(shard)
        problem = facts.local_problem() or range_problem(facts)
        if problem is not None:
            raise problem

    return settle_shard(look, group, num_classes, local_logits, validate)


def _nothing(shard: ClassShard) -> None:
    """All was looked at before."""
