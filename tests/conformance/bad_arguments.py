"""Wrong arguments of the loss, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance.bad_calls import (
    CLASSES,
    LAYOUT,
    TOKENS,
    UNSUPPORTED,
    BadCall,
    Call,
    changes,
    placements,
    with_options,
)
from tests.harness import this_world_size

__all__ = ["ARGUMENTS"]

_TARGETS = {
    "float target": BadCall(
        changes(target=lambda c: c.floats(TOKENS)),
        UNSUPPORTED,
        ("float32", "expected class indices of an integer dtype"),
    ),
    "probability target": BadCall(
        changes(target=lambda c: c.floats(TOKENS, CLASSES)),
        UNSUPPORTED,
        ("float32", "class probabilities are not supported", "expected class indices"),
    ),
    "probability target as a DTensor": BadCall(
        changes(
            target=lambda c: (
                c.distributed(
                    c.floats(TOKENS, CLASSES)[:, : CLASSES // this_world_size()],
                    *placements("S1"),
                    shape=(TOKENS, CLASSES),
                )
                if CLASSES % this_world_size() == 0
                else c.floats(TOKENS, CLASSES)
            )
        ),
        UNSUPPORTED,
        ("float32", "class probabilities are not supported"),
    ),
    "bool target": BadCall(
        changes(target=lambda c: c.adapter.tensor(np.ones(TOKENS, bool), "bool")),
        "TypeError",
        ("bool", "integer dtype"),
    ),
    "target that is no tensor": BadCall(changes(target=[0, 1, 2, 3]), "TypeError", ("list", "target tensor")),
    "longer target": BadCall(
        changes(target=lambda c: c.integers(np.zeros(TOKENS + 1))), LAYOUT, ("(5,)", "expected (4,)", "(4, 8)")
    ),
    "target with a further dim": BadCall(
        changes(target=lambda c: c.integers(np.zeros((TOKENS, 1)))), LAYOUT, ("(4, 1)", "expected (4,)")
    ),
    "one-hot integer target": BadCall(
        changes(target=lambda c: c.integers(np.zeros((TOKENS, CLASSES)))), LAYOUT, ("(4, 8)", "expected (4,)")
    ),
    "0-d target": BadCall(changes(target=lambda c: c.integers(3)), LAYOUT, ("()", "expected (4,)")),
    "target sharded over the class ranks": BadCall(
        changes(target=lambda c: _sharded_target(c)), LAYOUT, ("S(0)@tp", "expected shape (4,), R@tp")
    ),
    "partial target": BadCall(
        changes(target=lambda c: c.distributed(c.integers(c.labels), *placements("P"))),
        LAYOUT,
        ("P@tp", "expected", "R@tp"),
    ),
    "target on another device": BadCall(
        changes(target=lambda c: c.adapter.elsewhere(c.integers(c.labels))),
        LAYOUT,
        ("'meta'", "'cpu'", "expected the same device"),
        only=("torch",),
    ),
    "target out of range": BadCall(
        changes(target=lambda c: c.integers([0, 8, 9, 2])),
        "IndexError",
        ("Target 8 is out of bounds for 8 classes", "2 such targets", "ignore_index=-100"),
    ),
    "negative target": BadCall(
        changes(target=lambda c: c.integers([0, -1, 1, 2])), "IndexError", ("Target -1 is out of bounds for 8 classes",)
    ),
    "default ignore_index under another one": BadCall(
        changes(target=lambda c: c.integers([0, -100, 1, 2]), options={"ignore_index": 3}),
        "IndexError",
        ("Target -100 is out of bounds", "ignore_index=3"),
    ),
    "target out of range in the decomposed loss": BadCall(
        changes(target=lambda c: c.integers([0, 1, 2, 8]), entry="decomposed"),
        "IndexError",
        ("Target 8 is out of bounds for 8 classes",),
    ),
    "target out of range in the decomposed loss, float target": BadCall(
        changes(target=lambda c: c.floats(TOKENS), entry="decomposed"),
        UNSUPPORTED,
        ("float32", "expected class indices"),
    ),
}


def _sharded_target(call: Call) -> Any:
    from hyper_parallel import distribute_tensor

    return distribute_tensor(call.integers(call.labels), call.mesh, placements("S0"))


_OPTIONS = {
    "label smoothing": BadCall(
        with_options(label_smoothing=0.1), UNSUPPORTED, ("label_smoothing=0.1 is not supported", "expected 0.0")
    ),
    "label smoothing in the module": BadCall(
        changes(options={"label_smoothing": 0.1}, entry="module"), UNSUPPORTED, ("label_smoothing=0.1", "expected 0.0")
    ),
    "unknown reduction": BadCall(with_options(reduction="average"), "ValueError", ("average",)),
    "longer weight": BadCall(
        with_options(weight=lambda c: c.floats(CLASSES + 1)), LAYOUT, ("(9,)", "expected (8,)", "all classes")
    ),
    "weight of the local classes": BadCall(
        with_options(weight=lambda c: c.floats(-(-CLASSES // this_world_size()))),
        LAYOUT,
        ("expected (8,)", "all classes"),
    ),
    "weight with a further dim": BadCall(
        with_options(weight=lambda c: c.floats(CLASSES, 1)), LAYOUT, ("(8, 1)", "expected (8,)")
    ),
    "integer weight": BadCall(
        with_options(weight=lambda c: c.integers(np.ones(CLASSES))), "TypeError", ("int64", "expected", "float")
    ),
    "sharded weight": BadCall(
        with_options(weight=lambda c: _sharded_weight(c)), LAYOUT, ("S(0)@tp", "expected Replicate on every mesh dim")
    ),
    "weight on another device": BadCall(
        with_options(weight=lambda c: c.adapter.elsewhere(c.floats(CLASSES))),
        LAYOUT,
        ("'meta'", "'cpu'", "expected the same device"),
        only=("torch",),
    ),
    "weight that requires a gradient": BadCall(
        with_options(weight=lambda c: c.floats(CLASSES).requires_grad_()),
        UNSUPPORTED,
        ("not differentiable in the class weights",),
        only=("torch",),
    ),
    "weight that is no tensor": BadCall(
        with_options(weight=lambda c: [1.0] * CLASSES), "TypeError", ("list", "tensor")
    ),
}


def _sharded_weight(call: Call) -> Any:
    from hyper_parallel import distribute_tensor

    return distribute_tensor(call.floats(CLASSES), call.mesh, placements("S0"))


def _partial_logits(call: Call) -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    logits = call.distributed(call.floats(TOKENS, CLASSES), *placements("P"))
    with loss_parallel():
        call.adapter.cross_entropy("function", logits, call.integers(call.labels))


def _gathered_as_shards(call: Call) -> None:
    call.distributed(call.floats(TOKENS, CLASSES), *placements("S1"), shape=(TOKENS, CLASSES))


def _gathered_with_weight(call: Call) -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    logits = call.distributed(call.floats(TOKENS, CLASSES), *placements("S1"))
    with loss_parallel():
        call.adapter.cross_entropy("function", logits, call.integers(call.labels), weight=call.floats(CLASSES))


def _widths_that_differ(call: Call) -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    logits = call.distributed(call.floats(TOKENS, 4 + call.last), *placements("S1"))
    with loss_parallel():
        call.adapter.cross_entropy("function", logits, call.integers(call.labels))


_LOGITS = {
    "classes on the wrong dim": BadCall(
        changes(shards=(0,)), LAYOUT, ("S(0)@tp", "expected Shard(1) (the class dim) on exactly one mesh dim")
    ),
    "partial logits": BadCall(_partial_logits, LAYOUT, ("P@tp", "still to be reduced", "expected Shard(1)")),
    "integer logits": BadCall(changes(dtype="int64"), "TypeError", ("floating-point logits", "int64")),
    "float8 logits": BadCall(
        changes(dtype="float8_e4m3fn"), "TypeError", ("floating-point logits", "float8_e4m3fn"), only=("torch",)
    ),
    "replicated logits with an explicit mesh": BadCall(
        changes(shards=(None,), context=lambda c: {"mesh": c.mesh}), LAYOUT, ("R@tp", "expected Shard(1)")
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

ARGUMENTS: dict[str, BadCall] = {**_TARGETS, **_OPTIONS, **_LOGITS}
