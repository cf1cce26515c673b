"""A call of the loss as data, and what is right for it: every rank's loss and gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from tests.conformance.oracle import local_slices, reference, round_to

__all__ = ["REDUCTIONS", "LossCase", "expected_results", "make_case", "sharded_like"]

REDUCTIONS = ("none", "sum", "mean")


@dataclass(frozen=True)
class LossCase:
    """One call, described globally; every rank takes its part.

    Attributes:
        logits: global values, which ``dtype`` can hold exactly. The class dim is 0 of ``(C,)``, else 1.
        mesh: ranks along each mesh dim.
        shards: for each mesh dim the dim of the logits that it shards, None where it replicates.
        target_as: ``"plain"`` (all tokens, on every rank), ``"local"`` (plain, this rank's tokens), ``"replicated"``
            or ``"sharded"`` (a DTensor; the latter lies like the tokens).
        weight_as: ``"plain"`` or ``"replicated"``.
        options: passed on to the function (``reduction`` and ``ignore_index`` have fields of their own, and are
            left out where None).
        entry: see ``groups.ENTRIES``.
        upstream: the gradient that comes back to the loss: a number, or one for each token.
        context: arguments of ``loss_parallel``; None: outside of it.
        backward_inside: whether the backward pass runs inside the context too.
    """

    logits: np.ndarray
    target: np.ndarray
    mesh: tuple[int, ...]
    shards: tuple[int | None, ...]
    mesh_names: tuple[str, ...]
    dtype: str = "float32"
    target_dtype: str = "int64"
    target_as: str = "plain"
    weight: np.ndarray | None = None
    weight_dtype: str | None = None
    weight_as: str = "plain"
    ignore_index: int | None = None
    reduction: str | None = "mean"
    options: Mapping[str, Any] = field(default_factory=dict)
    entry: str = "function"
    upstream: Any = 1.0
    context: Mapping[str, Any] | None = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    backward_inside: bool = False

    def but(self, **changes: Any) -> LossCase:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def class_dim(self) -> int:
        return 0 if self.logits.ndim == 1 else 1

    @property
    def token_shards(self) -> tuple[int | None, ...]:
        """For each mesh dim the dim of the target that it shards."""
        dim = self.class_dim
        return tuple(None if s is None or s == dim else s - (s > dim) for s in self.shards)

    def slices(self, rank: int) -> tuple[slice, ...]:
        """What ``rank`` holds of the logits."""
        return local_slices(self.logits.shape, self.mesh, self.shards, rank)

    def token_slices(self, rank: int) -> tuple[slice, ...]:
        """What ``rank`` holds of the tokens."""
        return local_slices(self.target.shape, self.mesh, self.token_shards, rank)

    def upstream_of(self, rank: int) -> Any:
        """The gradient that comes back to the loss of ``rank``."""
        per_token = np.ndim(self.upstream) > 0 and np.shape(self.upstream) == self.target.shape
        return self.upstream[self.token_slices(rank)] if per_token else self.upstream

    @property
    def effective_reduction(self) -> str:
        """``reduction``, unless the deprecated arguments say otherwise, as in PyTorch's documentation."""
        average, reduce = self.options.get("size_average"), self.options.get("reduce")
        if average is None and reduce is None:
            return self.reduction or "mean"
        if reduce is False:
            return "none"
        return "sum" if average is False else "mean"


def make_case(
    world_size: int,
    shape: Sequence[int] = (6, 11),
    *,
    mesh: Sequence[int] | None = None,
    shards: Sequence[int | None] | None = None,
    dtype: str = "float32",
    weighted: bool = False,
    ignored: Sequence[int] = (),
    seed: int = 0,
    spread: float = 2.0,
    shift: float = 0.0,
    **fields: Any,
) -> LossCase:
    """A case with random logits and targets; ``ignored`` are positions in the flattened target.

    Without ``mesh`` all ranks share the classes.
    """
    rng = np.random.default_rng([seed, *shape])
    mesh = (world_size,) if mesh is None else tuple(mesh)
    assert prod(mesh) == world_size, f"mesh {mesh} needs {prod(mesh)} ranks"
    class_dim = 0 if len(shape) == 1 else 1
    logits = round_to(rng.standard_normal(shape) * spread + shift, dtype)
    classes = shape[class_dim]
    tokens = tuple(shape[:class_dim]) + tuple(shape[class_dim + 1 :])
    target = rng.integers(0, max(classes, 1), tokens)
    target.reshape(-1)[list(ignored)] = -100 if fields.get("ignore_index") is None else fields["ignore_index"]
    if weighted:
        weight = rng.uniform(0.25, 2.0, classes)
        fields["weight"] = round_to(weight, fields.get("weight_dtype") or dtype)
    if fields.get("reduction", "mean") == "none" and "upstream" not in fields:
        fields["upstream"] = round_to(rng.uniform(-2.0, 2.0, tokens), "bfloat16")
    if shards is None:
        shards = (*[None] * (len(mesh) - 1), class_dim)
    names = fields.pop("mesh_names", ("dp", "cp", "tp")[-len(mesh) :] if len(mesh) != 2 else ("dp", "tp"))
    return LossCase(logits, target, mesh, tuple(shards), tuple(names), dtype=dtype, **fields)


def sharded_like(case: LossCase, rank: int, full: np.ndarray) -> np.ndarray:
    """The part of a tensor of the logits' shape that ``rank`` holds."""
    return full[case.slices(rank)]


def expected_results(case: LossCase) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each rank its local loss and the gradient of its local logits, in float64."""
    ignore_index = -100 if case.ignore_index is None else case.ignore_index
    # Relative to each token's largest logit, which changes nothing and keeps float64's precision for large logits.
    top = case.logits.max(case.class_dim, keepdims=True, initial=-np.inf)
    logits = case.logits - np.where(np.isfinite(top), top, 0.0)
    tokens = reference.cross_entropy(
        [logits], case.class_dim, case.target, weight=case.weight, ignore_index=ignore_index
    )
    reduction = case.effective_reduction
    if reduction == "none":
        loss, gradient = tokens.loss, tokens.backward(case.upstream)[0]
    else:
        loss, gradients = reference.reduce_tokens([tokens], reduction)
        gradient = gradients[0][0] * np.float64(case.upstream)
    results = []
    for rank in range(prod(case.mesh)):
        own = np.asarray(loss)[case.token_slices(rank)] if reduction == "none" else np.asarray(loss)
        results.append((own, gradient[case.slices(rank)]))
    return results
