"""What the ranks of a class group tell each other about a call, and what is wrong with it: one decision on
all of them.

Each rank packs the facts of its call into a header of fixed size, all ranks gather all headers, and every
rank reads the same list and comes to the same conclusion. A rank that raised on its own would leave the
others waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hyper_parallel.errors import LossParallelLayoutError, LossParallelUnsupportedError

__all__ = ["EQUAL_ON_ALL_RANKS", "HEADER_LENGTH", "CallFacts", "find_error", "option_error", "range_error"]

_TEXT = "40s"  # operator names and dtypes; longer text is cut
_SHAPE = "9q"  # the number of dims, then the first eight
_FORMATS = {"str": _TEXT, "tuple[int, ...]": _SHAPE, "int": "q", "bool": "q", "float": "d"}

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = tuple(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))


@dataclass(frozen=True)
class CallFacts:
    """One rank's view of a call.

    Fields are named after the arguments; those of the weight are empty without one. ``same_device``: target
    and weight are where the logits are. ``target_digest`` depends on the values and their order,
    ``weight_digest`` too. ``bad_targets`` counts targets that are neither a class nor ``ignore_index``.
    ``overlap_blocks`` is text, so that anything can be told that was given for it.
    """

    kind: str
    description: str
    dim: int
    logits_shape: tuple[int, ...]
    logits_dtype: str
    start: int
    stop: int
    num_classes: int
    target_shape: tuple[int, ...]
    target_dtype: str
    weight_shape: tuple[int, ...]
    weight_dtype: str
    weight_requires_grad: bool
    same_device: bool
    ignore_index: int
    label_smoothing: float
    z_loss: float
    inplace: bool
    logits_are_leaf: bool
    target_digest: int = 0
    weight_digest: int = 0
    bad_targets: int = 0
    first_bad_target: int = 0
    overlap_blocks: str = "1"

    @property
    def has_target(self) -> bool:
        return self.target_dtype != ""

    @property
    def has_weight(self) -> bool:
        return self.weight_dtype != ""

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The logits' shape without the class dim."""
        return self.logits_shape[: self.dim] + self.logits_shape[self.dim + 1 :]

    def encode(self) -> list[int]:
        """The header: HEADER_LENGTH int64 values."""
        flat: list[bytes | int | float] = []
        for name, value in vars(self).items():
            if isinstance(value, str):
                flat.append(value.encode())
            elif isinstance(value, tuple):
                flat += [len(value), *(value + (0,) * 8)[:8]]
            elif name.endswith("digest"):
                flat.append(_as_int64(value))
            else:
                flat.append(value)
        return list(struct.unpack(f"<{HEADER_LENGTH}q", _HEADER.pack(*flat)))

    @classmethod
    def decode(cls, header: Sequence[int]) -> CallFacts:
        """The facts in another rank's header."""
        flat = iter(_HEADER.unpack(struct.pack(f"<{HEADER_LENGTH}q", *header)))
        values: dict[str, object] = {}
        for field in fields(cls):
            value = next(flat)
            if field.type == "str":
                value = value.rstrip(b"\0").decode(errors="replace")
            elif field.type == "tuple[int, ...]":
                dims = [next(flat) for _ in range(8)]
                value = tuple((dims + [0] * value)[:value])
            elif field.type == "bool":
                value = bool(value)
            values[field.name] = value
        return cls(**values)  # type: ignore[arg-type]

    def local_problem(self) -> Exception | None:
        """What is wrong with the call on this rank, as far as shapes, dtypes and options show."""
        return (
            self._logits_problem()
            or self._target_problem()
            or self._weight_problem()
            or self._option_problem()
        )

    def _logits_problem(self) -> Exception | None:
        if not 0 <= self.dim < len(self.logits_shape):
            return LossParallelLayoutError(
                f"the class dim is {self.dim}, but the local logits have shape {self.logits_shape}"
            )
        if self.logits_dtype not in _FLOATS:
            return TypeError(
                f"the logits have dtype {self.logits_dtype}; expected one of {', '.join(_FLOATS)}"
            )
        width = self.logits_shape[self.dim]
        if width != self.stop - self.start or not 0 <= self.start <= self.stop <= self.num_classes:
            return LossParallelLayoutError(
                f"found {width} classes in dim {self.dim} of the local logits (shape {self.logits_shape}); "
                f"expected {self.stop - self.start}, the classes [{self.start}, {self.stop}) "
                f"of {self.num_classes}"
            )
        return None

    def _target_problem(self) -> Exception | None:
        if not self.has_target:
            return None
        if self.target_dtype in _FLOATS:
            return LossParallelUnsupportedError(
                f"the target has dtype {self.target_dtype} and shape {self.target_shape}: class "
                "probabilities are not supported; expected class indices of an integer dtype"
            )
        if self.target_dtype not in _INTEGERS:
            return TypeError(f"the target is {self.target_dtype}; expected class indices of an integer dtype")
        if self.target_shape != self.token_shape:
            return LossParallelLayoutError(
                f"the target has shape {self.target_shape}; expected {self.token_shape}, the shape of the "
                f"local logits {self.logits_shape} without class dim {self.dim}"
            )
        if not self.same_device:
            return LossParallelLayoutError(
                "target or weight is on another device than the logits; expected the same"
            )
        return None

    def _weight_problem(self) -> Exception | None:
        if not self.has_weight:
            return None
        if self.weight_dtype not in _FLOATS:
            return TypeError(
                f"the weight has dtype {self.weight_dtype}; expected one of {', '.join(_FLOATS)}"
            )
        if self.weight_shape != (self.num_classes,):
            return LossParallelLayoutError(
                f"the weight has shape {self.weight_shape}; expected ({self.num_classes},), the weights of "
                "all classes on every rank"
            )
        if self.weight_requires_grad:
            return LossParallelUnsupportedError(
                "the loss is not differentiable in the class weights; detach them"
            )
        return None

    def _option_problem(self) -> Exception | None:
        problem = option_error(self.label_smoothing, self.z_loss)
        if problem is not None:
            return problem
        if not (self.overlap_blocks.isdecimal() and int(self.overlap_blocks) >= 1):
            return ValueError(f"overlap_blocks is {self.overlap_blocks}; expected a number of blocks, 1 or more")
        if self.kind == "nll_loss" and (self.label_smoothing or self.z_loss or self.inplace):
            return LossParallelUnsupportedError(
                "nll_loss takes no label_smoothing, z_loss or inplace; use cross_entropy"
            )
        if self.inplace and self.logits_are_leaf:
            return ValueError(
                "inplace=True would overwrite the values of a leaf tensor with its gradient; expected logits "
                "that were computed"
            )
        return None


_HEADER = struct.Struct("<" + "".join(_FORMATS[str(field.type)] for field in fields(CallFacts)))
HEADER_LENGTH = _HEADER.size // 8

EQUAL_ON_ALL_RANKS = {
    "kind": "the operation",
    "description": "the operation",
    "dim": "the class dim",
    "logits_dtype": "the logits' dtype",
    "token_shape": "the shape of the logits without the class dim",
    "num_classes": "the number of classes",
    "has_weight": "whether there are class weights",
    "weight_dtype": "the weight's dtype",
    "ignore_index": "ignore_index",
    "label_smoothing": "label_smoothing",
    "z_loss": "z_loss",
    "inplace": "inplace",
    "overlap_blocks": "overlap_blocks",
    "target_digest": "the digest of the target's values",
    "weight_digest": "the digest of the class weights",
}
"""What every rank of a class group must tell alike, and its name in messages."""


def find_error(facts: Sequence[CallFacts]) -> Exception | None:
    """The first thing wrong with a call, given every rank's facts in group order; None when nothing is."""
    for rank, one in enumerate(facts):
        problem = one.local_problem()
        if problem is not None:
            return (
                problem if len(facts) == 1 else type(problem)(f"on rank {rank} of the class group, {problem}")
            )
    first = facts[0]
    for name, what in EQUAL_ON_ALL_RANKS.items():
        for rank, one in enumerate(facts):
            found, expected = getattr(one, name), getattr(first, name)
            if found != expected:
                return LossParallelLayoutError(
                    f"{what} differs between the ranks of the class group: {found!r} on rank {rank}, "
                    f"{expected!r} on rank 0; expected the same on all ranks that share the class dim"
                )
    return _partition_error(facts) or range_error(
        first.bad_targets, first.first_bad_target, first.num_classes, first.ignore_index
    )


def _partition_error(facts: Sequence[CallFacts]) -> Exception | None:
    """The ranks' class ranges must cover every class once; ranks without classes may stand anywhere."""
    position = 0
    for start, stop in sorted((one.start, one.stop) for one in facts if one.start < one.stop):
        if start != position:
            break
        position = stop
    else:
        if position == facts[0].num_classes:
            return None
    ranges = ", ".join(f"[{one.start}, {one.stop})" for one in facts)
    together = sum(one.stop - one.start for one in facts)
    return LossParallelLayoutError(
        f"the ranks of the class group hold classes {ranges}, {together} together; expected each of the "
        f"{facts[0].num_classes} classes once (gathered logits are not shards)"
    )


def option_error(label_smoothing: float, z_loss: float) -> Exception | None:
    """Of numbers that no loss can be computed with."""
    if not 0.0 <= label_smoothing <= 1.0:
        return ValueError(f"label_smoothing is {label_smoothing}; expected a value in [0, 1]")
    if not z_loss >= 0.0:
        return ValueError(f"z_loss is {z_loss}; expected 0 or more")
    return None


def range_error(bad_targets: int, first: int, num_classes: int, ignore_index: int) -> Exception | None:
    """Of targets that are neither a class nor ``ignore_index``, if there are any."""
    if not bad_targets:
        return None
    return IndexError(
        f"Target {first} is out of bounds for {num_classes} classes; {bad_targets} such target(s), "
        f"ignore_index={ignore_index}"
    )


def _as_int64(value: int) -> int:
    """The signed 64-bit value of the same low bits."""
    return (value + 2**63) % 2**64 - 2**63
