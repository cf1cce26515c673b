"""The header that ranks exchange about a loss call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.errors import LossParallelLayoutError
from hyper_parallel.platform.call_check import HEADER_LENGTH, CallFacts, find_error

FACTS = CallFacts(
    kind="cross_entropy",
    description="mean",
    dim=1,
    logits_shape=(4, 3, 5),
    logits_dtype="bfloat16",
    start=0,
    stop=3,
    num_classes=6,
    target_shape=(4, 5),
    target_dtype="int64",
    weight_shape=(),
    weight_dtype="",
    weight_requires_grad=False,
    same_device=True,
    ignore_index=-100,
    label_smoothing=0.1,
    z_loss=0.0,
    inplace=False,
    logits_are_leaf=True,
    target_digest=-(2**63),
    weight_digest=2**63 - 1,
    bad_targets=0,
    first_bad_target=-1,
)
SECOND = replace(FACTS, start=3, stop=6)


def test_a_header_has_a_fixed_size_and_loses_nothing() -> None:
    for facts in (
        FACTS,
        replace(FACTS, logits_shape=(), target_shape=(1,) * 8),
        replace(FACTS, description="x" * 40),
    ):
        header = facts.encode()
        assert len(header) == HEADER_LENGTH
        assert all(-(2**63) <= value < 2**63 for value in header)
        assert CallFacts.decode(header) == facts


def test_what_does_not_fit_is_cut() -> None:
    facts = CallFacts.decode(replace(FACTS, description="x" * 99, target_shape=tuple(range(10))).encode())
    assert facts.description == "x" * 40
    assert facts.target_shape == (0, 1, 2, 3, 4, 5, 6, 7, 0, 0)


def test_agreement_is_no_error() -> None:
    assert find_error([FACTS, SECOND]) is None
    empty = replace(FACTS, logits_shape=(4, 0, 5), start=6, stop=6)
    assert find_error([SECOND, empty, FACTS]) is None  # in any order


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 3), (0, 3)],
        [(0, 3), (2, 5)],
        [(0, 2), (3, 6)],
        [(1, 3), (3, 6)],
        [(0, 3), (3, 5)],
        [(0, 0), (0, 0)],
    ],
    ids=str,
)
def test_ranges_must_cover_every_class_once(ranges: list[tuple[int, int]]) -> None:
    facts = [replace(FACTS, start=a, stop=b, logits_shape=(4, b - a, 5)) for a, b in ranges]
    error = find_error(facts)
    assert isinstance(error, LossParallelLayoutError)
    assert f"hold classes [{ranges[0][0]}, {ranges[0][1]})" in str(error)
    assert "expected each of the 6 classes once" in str(error)


def test_the_first_rank_that_is_wrong_is_named() -> None:
    wrong = replace(SECOND, target_shape=(4,))
    error = find_error([FACTS, wrong, wrong])
    assert isinstance(error, LossParallelLayoutError)
    assert str(error).startswith("on rank 1 of the class group, the target has shape (4,); expected (4, 5)")
    alone = find_error([replace(wrong, start=0, stop=3, num_classes=3)])
    assert str(alone).startswith("the target has shape (4,)")


def test_targets_out_of_range_come_last() -> None:
    bad = {"bad_targets": 2, "first_bad_target": 6}
    error = find_error([replace(FACTS, **bad), replace(SECOND, **bad)])
    assert isinstance(error, IndexError)
    assert "Target 6 is out of bounds for 6 classes; 2 such target(s), ignore_index=-100" in str(error)
    assert isinstance(find_error([replace(FACTS, **bad), SECOND, SECOND]), LossParallelLayoutError)
