"""Ranks that see a call of the loss differently, and what is wrong on a mesh of two dims."""

from __future__ import annotations

from collections.abc import Callable
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
    on_last,
    placements,
    with_options,
)
from tests.harness import this_rank

__all__ = ["DISAGREEMENTS", "TWO_DIMS"]


def _log_softmax_of(made: Callable[[Call], Any], dim: int = 1) -> Callable[[Call], None]:
    """The two steps of the loss, of logits that lie otherwise on the last rank."""

    def change(call: Call) -> None:
        from hyper_parallel.loss_parallel import loss_parallel

        logits = made(call) if call.last else call.distributed(call.floats(TOKENS, 4), *placements("S1"))
        with loss_parallel():
            log_probs = call.adapter.log_softmax(logits, dim if call.last else 1)
            call.adapter.cross_entropy("nll_of_logits", log_probs, call.integers(call.labels))

    return change


def _log_softmax_over(dim_of: Callable[[Call], int]) -> Callable[[Call], None]:
    """Call log_softmax instead of the loss."""

    def change(call: Call) -> None:
        from hyper_parallel.loss_parallel import loss_parallel

        logits = call.distributed(call.floats(TOKENS, 4), *placements("S1"))
        with loss_parallel():
            call.adapter.log_softmax(logits, dim_of(call))

    return change


DISAGREEMENTS = {
    "reduction": BadCall(
        on_last(with_options(reduction="sum")), LAYOUT, ("disagree", "reduction='mean'", "reduction='sum'")
    ),
    "reduction that one rank misspells": BadCall(
        on_last(with_options(reduction="average")), "ValueError", ("average",)
    ),
    "ignore_index": BadCall(
        on_last(with_options(ignore_index=-1)), LAYOUT, ("disagree", "ignore_index=-100", "ignore_index=-1")
    ),
    "target values": BadCall(
        on_last(changes(target=lambda c: c.integers([0, 1, 2, 4]))),
        LAYOUT,
        ("the target differs between ranks", "rank"),
    ),
    "target order": BadCall(
        on_last(changes(target=lambda c: c.integers([1, 0, 2, 3]))), LAYOUT, ("the target differs between ranks",)
    ),
    "number of tokens": BadCall(
        on_last(changes(shape=(TOKENS + 1, CLASSES))), LAYOUT, ("disagree", "(4, 8)", "(5, 8)")
    ),
    "number of classes": BadCall(on_last(changes(shape=(TOKENS, 12))), LAYOUT, ("disagree", "(4, 8)", "(4, 12)")),
    "dtype": BadCall(on_last(changes(dtype="float64")), LAYOUT, ("disagree", "float32 logits", "float64 logits")),
    "one rank replicated": BadCall(on_last(changes(shards=(None,))), LAYOUT, ("disagree", "S(1)@tp", "R@tp")),
    "all ranks but one replicated": BadCall(
        lambda c: None if c.last else setattr(c, "shards", (None,)), LAYOUT, ("disagree", "S(1)@tp", "R@tp")
    ),
    "one rank with another dim sharded": BadCall(
        on_last(changes(shards=(0,))), LAYOUT, ("S(0)@tp", "expected Shard(1) (the class dim)")
    ),
    "weight on one rank": BadCall(
        on_last(with_options(weight=lambda c: c.floats(CLASSES))), LAYOUT, ("disagree", "weight")
    ),
    "weight values": BadCall(
        with_options(weight=lambda c: c.adapter.tensor(np.full(CLASSES, 1.0 + c.last), "float32")),
        LAYOUT,
        ("disagree", "weight checksum"),
    ),
    "operator": BadCall(on_last(changes(entry="nll_of_logits")), LAYOUT, ("disagree", "cross_entropy", "nll_loss")),
    "label smoothing on one rank": BadCall(
        on_last(with_options(label_smoothing=0.1)), UNSUPPORTED, ("label_smoothing=0.1", "expected 0.0")
    ),
    "target out of range on one rank": BadCall(
        on_last(changes(target=lambda c: c.integers([0, 1, 2, 8]))), "IndexError", ("Target 8 is out of bounds",)
    ),
    "float target on one rank": BadCall(
        on_last(changes(target=lambda c: c.floats(TOKENS))), UNSUPPORTED, ("float32", "expected class indices")
    ),
    "longer target on one rank": BadCall(
        on_last(changes(target=lambda c: c.integers(np.zeros(5)))), LAYOUT, ("(5,)", "expected (4,)")
    ),
    "longer weight on one rank": BadCall(
        with_options(weight=lambda c: c.floats(CLASSES + c.last)), LAYOUT, ("(9,)", "expected (8,)")
    ),
    "log_softmax over a dim that is not there, on one rank": BadCall(
        _log_softmax_over(lambda c: 5 if c.last else 1), "IndexError", ("log_softmax over dim 5",)
    ),
    "log_softmax of Partial logits on one rank": BadCall(
        _log_softmax_of(lambda c: c.distributed(c.floats(TOKENS, CLASSES), *placements("P"))),
        LAYOUT,
        ("disagree", "S(1)@tp", "P@tp"),
    ),
    "log_softmax of 0-d logits on one rank": BadCall(
        _log_softmax_of(lambda c: c.distributed(c.floats(), *placements("R")), dim=0), LAYOUT, ("disagree", "R@tp")
    ),
    "log_softmax of replicated logits over a dim that is not there, on one rank": BadCall(
        _log_softmax_of(lambda c: c.distributed(c.floats(TOKENS, CLASSES), *placements("R")), dim=7),
        "IndexError",
        ("log_softmax over dim 7",),
    ),
    "strictness": BadCall(
        lambda c: changes(shards=(0,), context={"strict": c.last})(c), LAYOUT, ("S(0)@tp", "expected Shard(1)")
    ),
}

TWO_DIMS = {
    "classes on both": BadCall(
        changes(shards=(1, 1)), LAYOUT, ("S(1)@dp, S(1)@tp", "on exactly one mesh dim", "found it on 2"), mesh=(2, 2)
    ),
    "classes on none": BadCall(
        changes(shards=(0, None)), LAYOUT, ("S(0)@dp, R@tp", "on exactly one mesh dim", "found it on 0"), mesh=(2, 2)
    ),
    "wrong explicit mesh": BadCall(
        changes(context=lambda c: {"mesh": c.mesh["dp"]}),
        LAYOUT,
        ("(tp)", "mesh (dp=2) given to loss_parallel()"),
        mesh=(2, 2),
    ),
    "bad target in one dp part": BadCall(
        changes(target=lambda c: c.integers([0, 1, 2, 8])), "IndexError", ("Target 8 is out of bounds",), mesh=(2, 2)
    ),
    "bad target on one rank": BadCall(
        on_last(changes(target=lambda c: c.integers([0, 1, 2, 8]))), "IndexError", ("Target 8 is",), mesh=(2, 2)
    ),
    "reduction of one rank": BadCall(
        on_last(with_options(reduction="sum")), LAYOUT, ("disagree", "reduction='sum'"), mesh=(2, 2)
    ),
    "one rank replicated": BadCall(
        on_last(changes(shards=(None, None))), LAYOUT, ("disagree", "S(0)@dp, S(1)@tp", "R@dp, R@tp"), mesh=(2, 2)
    ),
    "target of one dp line": BadCall(
        changes(shards=(None, 1), target=lambda c: c.integers([0, 1, 2, 3 + (this_rank() >= 2)])),
        LAYOUT,
        ("the target differs between ranks",),
        mesh=(2, 2),
    ),
    "local target of the wrong size": BadCall(
        changes(target=lambda c: c.integers(np.zeros(3))), LAYOUT, ("(3,)", "expected (4,), or (2,)"), mesh=(2, 2)
    ),
}
