"""The last layer and its loss as one operation, without logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.trainer.data import IGNORE_INDEX
from hyper_parallel.trainer.loss import HeadLoss, whole_sequence

__all__ = ["LinearCrossEntropyLoss"]

_SEQUENCE = 1
"""The dim of hidden states ``[batch, length, width]`` that sequence parallelism shards."""


class LinearCrossEntropyLoss(HeadLoss):
    """:func:`linear_cross_entropy` in the place of the last layer: the logits are never held, in forward or backward.

    The last layer is whole, or its rows are shared between the ranks of a tensor-parallel group.
    """

    def __call__(
        self,
        head: Module,
        forward: Callable[..., Any],
        hidden: Any,
        labels: Any,
        global_valid_tokens: int | None = None,
    ) -> Tensor:
        from hyper_parallel.loss_parallel.linear import linear_cross_entropy  # settles the platform

        platform = get_platform()
        group, classes = _rows_of(head)
        over_sequence = isinstance(hidden, DTensor) and hidden.placements[0] == Shard(_SEQUENCE)
        loss: Tensor = linear_cross_entropy(
            hidden.to_local() if over_sequence else whole_sequence(hidden),
            # a view: MindSpore takes the gradient of a parameter itself for one of the size it was made with
            platform.reshape(head.weight, platform.shape(head.weight)),
            labels,
            group,
            bias=getattr(head, "bias", None),
            num_classes=classes,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            sequence_parallel=over_sequence,
            sequence_dim=_SEQUENCE,
        )
        return loss if global_valid_tokens is None else loss / max(global_valid_tokens, 1)


def _rows_of(head: Module) -> tuple[Group, int]:
    """The ranks that share the rows of the last layer's weight, and how many rows these are together.

    Raises:
        ValueError: it is cut in another way.
    """
    backend = get_module_backend()
    facts = backend.describe(head)
    if facts.transposed:
        raise ValueError(f"the last layer, {facts.type_name}, stores its weight as [in, out]; expected [out, in]")
    for rule in backend.rules(head):
        spec = rule.cuts.get("weight")
        if spec is not None and spec.dim is not None:
            if spec.dim != 0:
                raise ValueError(f"the last layer is cut as {spec}; expected its rows (dim 0) to be shared")
            return rule.group, spec.shape[0]
    return Group((get_platform().rank(),), None, 0), get_platform().shape(head.weight)[0]
