"""Wrong calls of the loss: what is done wrong on which rank, and the error that every rank must raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.conformance.adapters import Adapter, this_adapter
from tests.conformance.loss_calls import mesh_of
from tests.harness import this_rank, this_world_size

__all__ = ["BAD_CALLS", "BadCall", "run_bad_call"]

_TOKENS, _CLASSES = 4, 8
LAYOUT, UNSUPPORTED = "LossParallelLayoutError", "LossParallelUnsupportedError"


@dataclass
class Call:
    """The arguments of one rank; a bad call changes some of them."""

    adapter: Adapter
    rank: int
    last: bool
    """Whether this is the last rank, which is the one to differ where ranks disagree."""
    mesh: Any
    shape: tuple[int, ...] = (_TOKENS, _CLASSES)
    shards: tuple[int | None, ...] = (1,)
    dtype: str = "float32"
    target: Any = None
    entry: str = "function"
    options: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> np.ndarray:
        """A good target."""
        return np.arange(self.shape[0]) % _CLASSES

    def integers(self, array: Any, dtype: str = "int64") -> Any:
        return self.adapter.tensor(np.asarray(array), dtype)

    def floats(self, *shape: int) -> Any:
        return self.adapter.tensor(np.ones(shape), "float32")

    def distributed(self, local: Any, *placements: Any, shape: tuple[int, ...] | None = None) -> Any:
        from hyper_parallel import DTensor

        return DTensor.from_local(local, self.mesh, list(placements), shape=shape)


@dataclass(frozen=True)
class BadCall:
    """What is wrong, and what is to be raised.

    Attributes:
        change: does the wrong thing to a good call.
        error: type of the exception.
        says: parts of its message: what was found and what was expected.
        mesh: the mesh; None: all ranks share the classes.
        only: the platforms on which it can be tried; None: all.
    """

    change: Callable[[Call], None]
    error: str
    says: tuple[str, ...]
    mesh: tuple[int, ...] | None = None
    only: tuple[str, ...] | None = None
    same_text: bool = True
    """False where no rank can know of the others: each names its own part."""


def run_bad_call(name: str) -> None:
    """In a worker: make the call."""
    from hyper_parallel import Replicate, Shard, distribute_tensor
    from hyper_parallel.loss_parallel import loss_parallel

    bad, adapter = BAD_CALLS[name], this_adapter()
    size, rank = this_world_size(), this_rank()
    shape = bad.mesh or (size,)
    call = Call(adapter, rank, rank == size - 1, mesh_of(shape, ("dp", "tp")[-len(shape) :]))
    if len(shape) == 2:
        call.shards = (0, 1)
    bad.change(call)
    rng = np.random.default_rng(0)
    whole = adapter.tensor(rng.standard_normal(call.shape), call.dtype)
    placements = [Replicate() if s is None else Shard(s) for s in call.shards]
    logits = distribute_tensor(whole, call.mesh, placements)
    target = call.integers(call.labels) if call.target is None else call.target
    with loss_parallel(**call.context):
        adapter.cross_entropy(call.entry, logits, target, **call.options)


def _set(**changes: Any) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        for name, value in changes.items():
            setattr(call, name, value(call) if callable(value) else value)

    return change


def _on_last(change: Callable[[Call], None]) -> Callable[[Call], None]:
    """Only the last rank does it."""

    def changed(call: Call) -> None:
        if call.last:
            change(call)

    return changed


def _options(**options: Any) -> Callable[[Call], None]:
    return _set(options=lambda call: {k: v(call) if callable(v) else v for k, v in options.items()})


def _with(*placements: str) -> list[Any]:
    from hyper_parallel import Partial, Replicate, Shard

    return [{"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}[p] for p in placements]


_TARGETS = {
    "float target": BadCall(
        _set(target=lambda c: c.floats(_TOKENS)), UNSUPPORTED, ("float32", "expected class indices of an integer dtype")
    ),
    "probability target": BadCall(
        _set(target=lambda c: c.floats(_TOKENS, _CLASSES)),
        UNSUPPORTED,
        ("float32", "class probabilities are not supported", "expected class indices"),
    ),
    "probability target as a DTensor": BadCall(
        _set(
            target=lambda c: c.distributed(
                c.floats(_TOKENS, _CLASSES)[:, : _CLASSES // this_world_size()], *_with("S1"),
                shape=(_TOKENS, _CLASSES),
            )
            if _CLASSES % this_world_size() == 0
            else c.floats(_TOKENS, _CLASSES)
        ),
        UNSUPPORTED,
        ("float32", "class probabilities are not supported"),
    ),
    "bool target": BadCall(
        _set(target=lambda c: c.adapter.tensor(np.ones(_TOKENS, bool), "bool")), "TypeError", ("bool", "integer dtype")
    ),
    "target that is no tensor": BadCall(_set(target=[0, 1, 2, 3]), "TypeError", ("list", "target tensor")),
    "longer target": BadCall(
        _set(target=lambda c: c.integers(np.zeros(_TOKENS + 1))), LAYOUT, ("(5,)", "expected (4,)", "(4, 8)")
    ),
    "target with a further dim": BadCall(
        _set(target=lambda c: c.integers(np.zeros((_TOKENS, 1)))), LAYOUT, ("(4, 1)", "expected (4,)")
    ),
    "one-hot integer target": BadCall(
        _set(target=lambda c: c.integers(np.zeros((_TOKENS, _CLASSES)))), LAYOUT, ("(4, 8)", "expected (4,)")
    ),
    "0-d target": BadCall(_set(target=lambda c: c.integers(3)), LAYOUT, ("()", "expected (4,)")),
    "target sharded over the class ranks": BadCall(
        _set(target=lambda c: _sharded_target(c)), LAYOUT, ("S(0)@tp", "expected shape (4,), R@tp")
    ),
    "partial target": BadCall(
        _set(target=lambda c: c.distributed(c.integers(c.labels), *_with("P"))), LAYOUT, ("P@tp", "expected", "R@tp")
    ),
    "target on another device": BadCall(
        _set(target=lambda c: c.adapter.elsewhere(c.integers(c.labels))),
        LAYOUT,
        ("'meta'", "'cpu'", "expected the same device"),
        only=("torch",),
    ),
    "target out of range": BadCall(
        _set(target=lambda c: c.integers([0, 8, 9, 2])),
        "IndexError",
        ("Target 8 is out of bounds for 8 classes", "2 such targets", "ignore_index=-100"),
    ),
    "negative target": BadCall(
        _set(target=lambda c: c.integers([0, -1, 1, 2])), "IndexError", ("Target -1 is out of bounds for 8 classes",)
    ),
    "default ignore_index under another one": BadCall(
        _set(target=lambda c: c.integers([0, -100, 1, 2]), options={"ignore_index": 3}),
        "IndexError",
        ("Target -100 is out of bounds", "ignore_index=3"),
    ),
    "target out of range in the decomposed loss": BadCall(
        _set(target=lambda c: c.integers([0, 1, 2, 8]), entry="decomposed"),
        "IndexError",
        ("Target 8 is out of bounds for 8 classes",),
    ),
    "target out of range in the decomposed loss, float target": BadCall(
        _set(target=lambda c: c.floats(_TOKENS), entry="decomposed"), UNSUPPORTED, ("float32", "expected class indices")
    ),
}  # fmt: skip


def _sharded_target(call: Call) -> Any:
    from hyper_parallel import distribute_tensor

    return distribute_tensor(call.integers(call.labels), call.mesh, _with("S0"))


_OPTIONS = {
    "label smoothing": BadCall(
        _options(label_smoothing=0.1), UNSUPPORTED, ("label_smoothing=0.1 is not supported", "expected 0.0")
    ),
    "label smoothing in the module": BadCall(
        _set(options={"label_smoothing": 0.1}, entry="module"), UNSUPPORTED, ("label_smoothing=0.1", "expected 0.0")
    ),
    "unknown reduction": BadCall(_options(reduction="average"), "ValueError", ("average",)),
    "longer weight": BadCall(
        _options(weight=lambda c: c.floats(_CLASSES + 1)), LAYOUT, ("(9,)", "expected (8,)", "all classes")
    ),
    "weight of the local classes": BadCall(
        _options(weight=lambda c: c.floats(-(-_CLASSES // this_world_size()))), LAYOUT, ("expected (8,)", "all classes")
    ),
    "weight with a further dim": BadCall(
        _options(weight=lambda c: c.floats(_CLASSES, 1)), LAYOUT, ("(8, 1)", "expected (8,)")
    ),
    "integer weight": BadCall(
        _options(weight=lambda c: c.integers(np.ones(_CLASSES))), "TypeError", ("int64", "floating")
    ),
    "sharded weight": BadCall(
        _options(weight=lambda c: _sharded_weight(c)), LAYOUT, ("S(0)@tp", "expected Replicate on every mesh dim")
    ),
    "weight on another device": BadCall(
        _options(weight=lambda c: c.adapter.elsewhere(c.floats(_CLASSES))),
        LAYOUT,
        ("'meta'", "'cpu'", "expected the same device"),
        only=("torch",),
    ),
    "weight that is no tensor": BadCall(_options(weight=lambda c: [1.0] * _CLASSES), "TypeError", ("list", "tensor")),
}


def _sharded_weight(call: Call) -> Any:
    from hyper_parallel import distribute_tensor

    return distribute_tensor(call.floats(_CLASSES), call.mesh, _with("S0"))


def _partial_logits(call: Call) -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    logits = call.distributed(call.floats(_TOKENS, _CLASSES), *_with("P"))
    with loss_parallel():
        call.adapter.cross_entropy("function", logits, call.integers(call.labels))


def _gathered_as_shards(call: Call) -> None:
    call.distributed(call.floats(_TOKENS, _CLASSES), *_with("S1"), shape=(_TOKENS, _CLASSES))


def _gathered_with_weight(call: Call) -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    logits = call.distributed(call.floats(_TOKENS, _CLASSES), *_with("S1"))
    with loss_parallel():
        call.adapter.cross_entropy("function", logits, call.integers(call.labels), weight=call.floats(_CLASSES))


def _widths_that_differ(call: Call) -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    logits = call.distributed(call.floats(_TOKENS, 4 + call.last), *_with("S1"))
    with loss_parallel():
        call.adapter.cross_entropy("function", logits, call.integers(call.labels))


_LOGITS = {
    "classes on the wrong dim": BadCall(
        _set(shards=(0,)), LAYOUT, ("S(0)@tp", "expected Shard(1) (the class dim) on exactly one mesh dim")
    ),
    "partial logits": BadCall(_partial_logits, LAYOUT, ("P@tp", "still to be reduced", "expected Shard(1)")),
    "integer logits": BadCall(_set(dtype="int64"), "TypeError", ("floating-point logits", "int64")),
    "replicated logits with an explicit mesh": BadCall(
        _set(shards=(None,), context=lambda c: {"mesh": c.mesh}), LAYOUT, ("R@tp", "expected Shard(1)")
    ),
    "gathered logits taken for shards": BadCall(
        _gathered_as_shards,
        "ValueError",
        ("local tensor has shape (4, 8)", "shape (4, 8), S(1)@tp"),
        same_text=False,
    ),
    "gathered logits with weights": BadCall(_gathered_with_weight, LAYOUT, ("have shape (8,)", "expected (")),
    "shards whose widths do not add up": BadCall(
        _widths_that_differ, LAYOUT, ("disagree", "S(1)@tp", "rank 0 has", "shape (4, ")
    ),
}

_DISAGREEMENTS = {
    "reduction": BadCall(
        _on_last(_options(reduction="sum")), LAYOUT, ("disagree", "reduction='mean'", "reduction='sum'")
    ),
    "reduction that one rank misspells": BadCall(_on_last(_options(reduction="average")), "ValueError", ("average",)),
    "ignore_index": BadCall(
        _on_last(_options(ignore_index=-1)), LAYOUT, ("disagree", "ignore_index=-100", "ignore_index=-1")
    ),
    "target values": BadCall(
        _on_last(_set(target=lambda c: c.integers([0, 1, 2, 4]))), LAYOUT, ("the target differs between ranks", "rank")
    ),
    "target order": BadCall(
        _on_last(_set(target=lambda c: c.integers([1, 0, 2, 3]))), LAYOUT, ("the target differs between ranks",)
    ),
    "number of tokens": BadCall(
        _on_last(_set(shape=(_TOKENS + 1, _CLASSES))), LAYOUT, ("disagree", "(4, 8)", "(5, 8)")
    ),
    "number of classes": BadCall(_on_last(_set(shape=(_TOKENS, 12))), LAYOUT, ("disagree", "(4, 8)", "(4, 12)")),
    "dtype": BadCall(_on_last(_set(dtype="float64")), LAYOUT, ("disagree", "float32 logits", "float64 logits")),
    "one rank replicated": BadCall(_on_last(_set(shards=(None,))), LAYOUT, ("disagree", "S(1)@tp", "R@tp")),
    "all ranks but one replicated": BadCall(
        lambda c: None if c.last else setattr(c, "shards", (None,)), LAYOUT, ("disagree", "S(1)@tp", "R@tp")
    ),
    "one rank with another dim sharded": BadCall(
        _on_last(_set(shards=(0,))), LAYOUT, ("S(0)@tp", "expected Shard(1) (the class dim)")
    ),
    "weight on one rank": BadCall(_on_last(_options(weight=lambda c: c.floats(_CLASSES))), LAYOUT, ("disagree", "weight")),
    "weight values": BadCall(
        _options(weight=lambda c: c.adapter.tensor(np.full(_CLASSES, 1.0 + c.last), "float32")),
        LAYOUT,
        ("disagree", "weight checksum"),
    ),
    "operator": BadCall(_on_last(_set(entry="nll_of_logits")), LAYOUT, ("disagree", "cross_entropy", "nll_loss")),
    "label smoothing on one rank": BadCall(
        _on_last(_options(label_smoothing=0.1)), UNSUPPORTED, ("label_smoothing=0.1", "expected 0.0")
    ),
    "target out of range on one rank": BadCall(
        _on_last(_set(target=lambda c: c.integers([0, 1, 2, 8]))), "IndexError", ("Target 8 is out of bounds",)
    ),
    "float target on one rank": BadCall(
        _on_last(_set(target=lambda c: c.floats(_TOKENS))), UNSUPPORTED, ("float32", "expected class indices")
    ),
    "longer target on one rank": BadCall(
        _on_last(_set(target=lambda c: c.integers(np.zeros(5)))), LAYOUT, ("(5,)", "expected (4,)")
    ),
    "longer weight on one rank": BadCall(
        _options(weight=lambda c: c.floats(_CLASSES + c.last)), LAYOUT, ("(9,)", "expected (8,)")
    ),
    "strictness": BadCall(
        lambda c: _set(shards=(0,), context={"strict": c.last})(c), LAYOUT, ("S(0)@tp", "expected Shard(1)")
    ),
}

_TWO_DIMS = {
    "two dims: classes on both": BadCall(
        _set(shards=(1, 1)), LAYOUT, ("S(1)@dp, S(1)@tp", "on exactly one mesh dim", "found it on 2"), mesh=(2, 2)
    ),
    "two dims: classes on none": BadCall(
        _set(shards=(0, None)), LAYOUT, ("S(0)@dp, R@tp", "on exactly one mesh dim", "found it on 0"), mesh=(2, 2)
    ),
    "two dims: wrong explicit mesh": BadCall(
        _set(context=lambda c: {"mesh": c.mesh["dp"]}), LAYOUT, ("(tp)", "mesh (dp=2) given to loss_parallel()"),
        mesh=(2, 2),
    ),
    "two dims: bad target in one dp part": BadCall(
        _set(target=lambda c: c.integers([0, 1, 2, 8])), "IndexError", ("Target 8 is out of bounds",), mesh=(2, 2)
    ),
    "two dims: bad target on one rank": BadCall(
        _on_last(_set(target=lambda c: c.integers([0, 1, 2, 8]))), "IndexError", ("Target 8 is",), mesh=(2, 2)
    ),
    "two dims: reduction of one rank": BadCall(
        _on_last(_options(reduction="sum")), LAYOUT, ("disagree", "reduction='sum'"), mesh=(2, 2)
    ),
    "two dims: one rank replicated": BadCall(
        _on_last(_set(shards=(None, None))), LAYOUT, ("disagree", "S(0)@dp, S(1)@tp", "R@dp, R@tp"), mesh=(2, 2)
    ),
    "two dims: target of one dp line": BadCall(
        _set(shards=(None, 1), target=lambda c: c.integers([0, 1, 2, 3 + (this_rank() >= 2)])),
        LAYOUT,
        ("the target differs between ranks",),
        mesh=(2, 2),
    ),
    "two dims: local target of the wrong size": BadCall(
        _set(target=lambda c: c.integers(np.zeros(3))), LAYOUT, ("(3,)", "expected (4,), or (2,)"), mesh=(2, 2)
    ),
}  # fmt: skip

BAD_CALLS: dict[str, BadCall] = {
    **_TARGETS,
    **_OPTIONS,
    **_LOGITS,
    **{f"ranks disagree: {name}": bad for name, bad in _DISAGREEMENTS.items()},
    **_TWO_DIMS,
}
