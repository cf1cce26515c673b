"""What a loss call tells about itself, for the checks of :mod:`.call_check`; backends only read their own tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from hyper_parallel.platform.call_check import CallFacts
from hyper_parallel.platform.kernel_arguments import ClassShard, LossOptions, Tensor

__all__ = ["FactReader"]


class FactReader(ABC):
    """Facts of tensors of one backend."""

    @abstractmethod
    def is_tensor(self, x: Any) -> bool:
        """Whether it is one of the backend's."""

    @abstractmethod
    def dtype_name(self, x: Tensor) -> str:
        """Such as ``"float32"``."""

    @abstractmethod
    def requires_grad(self, x: Tensor) -> bool:
        """Whether operators on it are being recorded."""

    @abstractmethod
    def is_leaf(self, x: Tensor) -> bool:
        """Whether it requires a gradient, and no recorded operator made it."""

    @abstractmethod
    def labels(self, target: Tensor) -> Any:
        """The values as a vector of int64: any kind of array that is indexed by a mask."""

    @abstractmethod
    def weight_bits(self, weight: Tensor) -> Any:
        """The values in fp64, their bits read as int64: a vector as that of :meth:`labels`."""

    @abstractmethod
    def positions(self, like: Any) -> Any:
        """0, 1, 2 and so on for a vector, of its kind."""

    def describe(
        self,
        kind: str,
        local_logits: Tensor,
        dim: int,
        target: Tensor | None,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> CallFacts:
        """What shapes, dtypes and options tell, without looking at a value."""
        others: list[Tensor] = [x for x in (target, weight) if self.is_tensor(x)]
        return CallFacts(
            kind=kind,
            description=options.description,
            dim=dim,
            logits_shape=tuple(local_logits.shape),
            logits_dtype=self._dtype(local_logits),
            start=shard.start,
            stop=shard.stop,
            num_classes=shard.num_classes,
            target_shape=self._shape(target),
            target_dtype=self._dtype(target),
            weight_shape=self._shape(weight),
            weight_dtype=self._dtype(weight),
            weight_requires_grad=self.is_tensor(weight) and self.requires_grad(weight),
            same_device=all(x.device == local_logits.device for x in others),
            ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            inplace=options.inplace,
            logits_are_leaf=self.is_leaf(local_logits),
            overlap_blocks=repr(options.overlap_blocks),
        )

    def read_values(self, facts: CallFacts, target: Tensor | None, weight: Tensor | None) -> CallFacts:
        """Add what the values of target and weight tell."""
        if target is not None:
            digest, count, first = self.target_values(target, facts.num_classes, facts.ignore_index)
            facts = replace(facts, target_digest=digest, bad_targets=count, first_bad_target=first)
        if weight is not None:
            facts = replace(facts, weight_digest=self._digest(self.weight_bits(weight)))
        return facts

    def target_values(self, target: Tensor, num_classes: int, ignore_index: int) -> tuple[int, int, int]:
        """A digest, how many are no classes, and the first of these (0 of none)."""
        labels = self.labels(target)
        bad = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
        count = int(bad.sum())
        return self._digest(labels), count, int(labels[bad][0]) if count else 0

    def _digest(self, values: Any) -> int:
        """A 64-bit number that (as good as always) tells two vectors of int64 apart, also by their order."""
        mixed = (values + self.positions(values) * 0x632BE59BD9B4E019) * 0x1E3779B97F4A7C15  # wraps around
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        return int((mixed ^ (mixed >> 32)).sum())

    def _dtype(self, x: Any) -> str:
        if x is None:
            return ""
        return self.dtype_name(x) if self.is_tensor(x) else f"a {type(x).__name__}"

    def _shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape) if self.is_tensor(x) else ()
