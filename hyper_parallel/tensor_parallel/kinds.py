"""Styles by name, so that plans can be written as text: the names that transformers uses in its plans, and
a few more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.tensor_parallel.linear_loss import LinearLossParallel
from hyper_parallel.tensor_parallel.prepare import NoParallel, SequenceParallel, SummedGradients
from hyper_parallel.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = ["style_kinds", "style_of"]

_KINDS: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_loss_parallel": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "linear_loss": LinearLossParallel,
    "packed_colwise": lambda: ColwiseParallel(parts=2),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    "replicated_with_grad_allreduce": SummedGradients,
    "replicate": NoParallel,
}

_REFUSED = {
    "moe_tp_experts": "mixture-of-experts layers",
    "moe_identity_expert": "mixture-of-experts layers",
    "packed_rowwise": "expert weights packed along their last dim",
    "mla_kv_a_proj": "latent attention (MLA)",
    "local_params": "modules that hold bare parameters",
    "all_reduce": "modules whose output is summed without a rule for what is inside",
}


def style_kinds() -> tuple[str, ...]:
    """The names that :func:`style_of` takes."""
    return tuple(sorted(_KINDS))


def style_of(kind: str | ParallelStyle, pattern: str) -> ParallelStyle:
    """The style that a plan gives for ``pattern``, by name or as it is.

    Raises:
        ParallelPlanError: a name that is unknown, or known and not supported.
    """
    if isinstance(kind, ParallelStyle):
        return kind
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]()
    if isinstance(kind, str) and (kind in _REFUSED or kind.startswith(("moe", "grouped_gemm", "ep_"))):
        what = _REFUSED.get(kind, "mixture-of-experts layers")
        raise ParallelPlanError(
            f"{pattern!r}: kind {kind!r} is not supported ({what}); supported kinds: {style_kinds()}"
        )
    raise ParallelPlanError(
        f"{pattern!r}: expected a ParallelStyle or one of the kinds {style_kinds()}, found {kind!r}"
    )
