"""A call that is wrong on one rank is the same error on all of them, before anyone waits for anyone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from tests.harness import run_distributed, this_rank
from tests.torch.loss_calls import class_shard, kernels, numpy64

pytestmark = pytest.mark.platform("torch")

LAYOUT, UNSUPPORTED = "LossParallelLayoutError", "LossParallelUnsupportedError"
COUNT, CLASSES = 4, 6


def call(changes: dict[str, Any], only_rank: int | None = None, kind: str = "cross_entropy") -> Any:
    """A correct call, but for ``changes`` (on ``only_rank``, or everywhere); in a worker."""
    import torch

    shard = class_shard(CLASSES)
    values = {
        "shape": (COUNT, shard.stop - shard.start),
        "dim": 1,
        "dtype": "float32",
        "target": [0, 5, -100, 2],
        "target_dtype": "int64",
        "weight": None,
        "start": shard.start,
        "stop": shard.stop,
        "num_classes": CLASSES,
        "leaf": False,
        "options": {},
    }
    if only_rank is None or this_rank() == only_rank:
        values.update(changes)
    x = torch.zeros(values["shape"], dtype=getattr(torch, values["dtype"]))
    if x.is_floating_point():
        x.requires_grad_(values["leaf"])
    target: Any = values["target"]
    if values["target_dtype"] != "list":
        target = torch.tensor(target).to(getattr(torch, values["target_dtype"]))
    weight = None if values["weight"] is None else torch.tensor(values["weight"])
    if values.get("weight_grad"):
        weight.requires_grad_()
    where = ClassShard(values["start"], values["stop"], values["num_classes"], shard.group)
    if kind == "log_softmax":
        return numpy64(kernels().log_softmax(x, values["dim"], where))
    method = getattr(kernels(), kind)
    return numpy64(method(x, values["dim"], target, where, weight, LossOptions(**values["options"]))[0])


ON_ONE_RANK = {
    "float target": ({"target": [0.5] * 4, "target_dtype": "float32"}, UNSUPPORTED, "float32.*probabilities"),
    "bool target": ({"target_dtype": "bool"}, "TypeError", "target is bool; expected .*integer"),
    "no tensor": ({"target_dtype": "list"}, "TypeError", "target is a list"),
    "short target": ({"target": [0, 5, 2]}, LAYOUT, r"target has shape \(3,\); expected \(4,\)"),
    "fewer tokens": ({"shape": (3, 3), "target": [0, 5, 2]}, LAYOUT, r"\(3,\) on rank 1, \(4,\) on rank 0"),
    "fewer classes": ({"shape": (4, 2)}, LAYOUT, r"found 2 classes .* expected 3, the classes \[3, 6\) of 6"),
    "gathered logits": ({"shape": (4, 6)}, LAYOUT, r"found 6 classes .* expected 3"),
    "no such dim": ({"dim": 2}, LAYOUT, r"class dim is 2.*\(4, 3\)"),
    "integer logits": ({"dtype": "int32"}, "TypeError", "logits have dtype int32"),
    "other dtype": (
        {"dtype": "bfloat16"},
        LAYOUT,
        "dtype differs .*'bfloat16' on rank 1, 'float32' on rank 0",
    ),
    "other targets": ({"target": [0, 5, -100, 3]}, LAYOUT, "digest of the target's values differs"),
    "other order": ({"target": [5, 0, -100, 2]}, LAYOUT, "digest of the target's values differs"),
    "only one weight": (
        {"weight": [1.0] * 6},
        LAYOUT,
        "class weights differs .*True on rank 1, False on rank 0",
    ),
    "local weight": ({"weight": [1.0] * 3}, LAYOUT, r"weight has shape \(3,\); expected \(6,\)"),
    "integer weight": ({"weight": [1] * 6}, "TypeError", "weight has dtype int64"),
    "learnt weight": ({"weight": [1.0] * 6, "weight_grad": True}, UNSUPPORTED, "detach"),
    "other num_classes": ({"num_classes": 7}, LAYOUT, "number of classes differs .*7 on rank 1, 6 on rank 0"),
    "overlap": ({"start": 2, "stop": 5}, LAYOUT, r"hold classes \[0, 3\), \[2, 5\), 6 together"),
    "other ignore_index": (
        {"options": {"ignore_index": 0}},
        LAYOUT,
        "ignore_index differs .*0 on rank 1, -100",
    ),
    "other smoothing": (
        {"options": {"label_smoothing": 0.1}},
        LAYOUT,
        "label_smoothing differs .*0.1 on rank 1",
    ),
    "other reduction": (
        {"options": {"description": "sum"}},
        LAYOUT,
        "operation differs .*'sum' on rank 1, ''",
    ),
    "bad smoothing": (
        {"options": {"label_smoothing": 1.5}},
        "ValueError",
        r"1.5; expected a value in \[0, 1\]",
    ),
    "NaN z-loss": ({"options": {"z_loss": float("nan")}}, "ValueError", "z_loss is nan"),
    "in place on a leaf": ({"leaf": True, "options": {"inplace": True}}, "ValueError", "leaf"),
}


@pytest.mark.contract("E1", "E2")
@pytest.mark.parametrize("changes, error, message", ON_ONE_RANK.values(), ids=ON_ONE_RANK)
def test_wrong_on_one_rank_is_an_error_on_all(changes: dict[str, Any], error: str, message: str) -> None:
    ranks = run_distributed(call, changes, 1, world_size=2, expect_error=True)
    assert ranks[0] == ranks[1]
    assert ranks[0].type == error
    assert_matches(message, ranks[0].message)


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text, re.DOTALL), f"{text!r} does not match {pattern!r}"


@pytest.mark.parametrize("world_size", (1, 3))
def test_targets_out_of_range(world_size: int) -> None:
    target = {"target": [0, 999, -1, 6]}
    expected = (
        "IndexError",
        "Target 999 is out of bounds for 6 classes; 3 such target(s), ignore_index=-100",
    )
    for kind in ("cross_entropy", "nll_loss"):
        ranks = run_distributed(call, target, None, kind, world_size=world_size, expect_error=True)
        assert [tuple(rank) for rank in ranks] == [expected] * world_size


def test_unvalidated_targets_out_of_range_are_nan() -> None:
    changes = {"target": [0, 999, -100, 5], "options": {"validate": False}}
    for kind in ("cross_entropy", "nll_loss"):
        for loss in run_distributed(call, changes, None, kind, world_size=2):
            assert np.isnan(loss).tolist() == [False, True, False, False]


@pytest.mark.parametrize("world_size", (2,))
def test_gap_between_the_ranks_classes(world_size: int) -> None:
    ranks = run_distributed(
        call, {"num_classes": 7}, None, "log_softmax", world_size=world_size, expect_error=True
    )
    message = r"hold classes \[0, 3\), \[3, 6\), 6 together; expected each of the 7 classes once"
    for rank in ranks:
        assert rank.type == LAYOUT
        assert_matches(message, rank.message)


def test_unvalidated_calls_still_look_at_their_own_shapes() -> None:
    changes = {"target": [0.5] * 4, "target_dtype": "float32", "options": {"validate": False}}
    for rank in run_distributed(call, changes, world_size=2, expect_error=True):
        assert rank.type == UNSUPPORTED


def test_options_that_the_decomposed_route_cannot_take() -> None:
    changes = {"options": {"label_smoothing": 0.1}}
    for rank in run_distributed(call, changes, None, "nll_loss", world_size=2, expect_error=True):
        assert rank.type == UNSUPPORTED
        assert_matches("nll_loss takes no label_smoothing", rank.message)


def check() -> list[str | None]:
    """What check_call returns, without raising."""
    import torch

    shard = class_shard(CLASSES)
    x = torch.zeros(2, shard.stop - shard.start)
    right, wrong = torch.tensor([0, 5]), torch.tensor([0, 6])
    return [
        None if error is None else type(error).__name__
        for error in (
            kernels().check_call(x, 1, right, shard),
            kernels().check_call(x, 1, wrong, shard, None, LossOptions(validate=False)),
            kernels().check_call(x, 1, None, shard, kind="log_softmax"),
        )
    ]


def test_check_call_returns_what_is_wrong() -> None:
    assert run_distributed(check, world_size=3) == [[None, "IndexError", None]] * 3
