"""Dtypes, large shifts, infinities: what comes out is right to the last promised bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.cases import REDUCTIONS, make_case
from tests.conformance.groups import FLOATS, HALVES, on_groups, on_offers
from tests.conformance.loss_calls import check, check_results, run_case
from tests.conformance.oracle import round_to
from tests.harness import run_distributed

reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
entries = pytest.mark.parametrize("entry", ["function", "decomposed"])


@pytest.mark.contract("G1")
@on_offers(FLOATS, "dtype")
@reductions
def test_dtypes(platform: str, world_size: int, dtype: str, reduction: str) -> None:
    """The loss is fp32 (fp64 for fp64 logits), the gradient has the logits' dtype and is rounded once."""
    check(platform, make_case(world_size, (9, 53), dtype=dtype, reduction=reduction, weighted=True, ignored=[3]))


@pytest.mark.contract("G1")
@on_offers(HALVES, "dtype", 1, 2, 4)
def test_half_precision_with_many_classes(platform: str, world_size: int, dtype: str) -> None:
    """At 32768 classes the gradient's error is that of one rounding, the loss is right to fp32."""
    check(platform, make_case(world_size, (4, 32768), dtype=dtype, upstream=512.0, reduction="sum"))


@pytest.mark.contract("G1")
@on_offers(HALVES, "dtype", 2)
def test_half_precision_logits_with_fp32_weights(platform: str, world_size: int, dtype: str) -> None:
    """Weights keep their own precision."""
    check(platform, make_case(world_size, dtype=dtype, weighted=True, weight_dtype="float32"))


@pytest.mark.contract("G1", "K1")
@on_groups()
@entries
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shift", [1e4, -1e4, 3e7])
def test_shifted_logits(platform: str, world_size: int, dtype: str, shift: float, entry: str) -> None:
    """A large number added to all logits: nothing overflows, and loss and gradient keep their precision."""
    if entry == "decomposed" and shift == 3e7:
        shift = 1e6
    case = make_case(world_size, shift=shift, spread=4.0, dtype=dtype, reduction="none", ignored=[1], entry=entry)
    check(platform, case)
    check(platform, case.but(reduction="mean", upstream=1.0))


@pytest.mark.contract("G1")
@on_groups(1, 2, 3)
def test_rows_far_apart(platform: str, world_size: int) -> None:
    """Tokens whose logits are of different sizes, and tokens that are as good as certain."""
    case = make_case(world_size, (6, 11), reduction="none", spread=1.0)
    logits = case.logits * np.array([1e-3, 1.0, 30.0, 1e3, 1e5, 1e-20])[:, None]
    for rounded in (round_to(logits, "float32"), round_to(logits, "float32") + 0.0):
        target = rounded.argmax(1)  # certain: nll is about 0
        check(platform, case.but(logits=rounded, target=target))
        check(platform, case.but(logits=rounded))


@pytest.mark.contract("G1", "P3")
@on_groups()
@entries
def test_classes_of_minus_infinity(platform: str, world_size: int, entry: str) -> None:
    """Masked classes, on one rank's whole shard too; padding with -inf changes nothing."""
    case = make_case(world_size, (6, 8), reduction="none", weighted=True, ignored=[4], entry=entry)
    logits, target = case.logits.copy(), case.target.copy()
    logits[0, 0] = logits[1, :4] = logits[2, 4:] = logits[3, 1:] = -np.inf
    target[:4] = [1, 5, 2, 0]
    check(platform, case.but(logits=logits, target=target))
    check(platform, case.but(logits=logits, target=target, reduction="mean", upstream=1.0))


@pytest.mark.contract("P3")
@on_groups(2, 3, 4)
@entries
def test_vocabulary_padded_with_minus_infinity(platform: str, world_size: int, entry: str) -> None:
    """Columns that pad the vocabulary, held at -inf, leave the loss that of the real classes."""
    case = make_case(world_size, (6, 10), ignored=[2], entry=entry)
    padded = np.concatenate([case.logits, np.full((6, 6), -np.inf)], 1)
    wanted = check(platform, case)
    found = check(platform, case.but(logits=padded))
    np.testing.assert_allclose(found[0]["loss"], wanted[0]["loss"], rtol=1e-6)


@pytest.mark.contract("G1")
@on_groups(1, 2, 3)
def test_target_class_of_minus_infinity(platform: str, world_size: int) -> None:
    """A target whose probability is 0: the loss is inf, as in PyTorch; the gradient of its row is p - 1."""
    case = make_case(world_size, (4, 8), reduction="none", upstream=np.ones(4))
    logits = case.logits.copy()
    logits[1, case.target[1]] = -np.inf
    results = check(platform, case.but(logits=logits))
    assert np.isposinf(results[0]["loss"][1])


@pytest.mark.contract("G1")
@on_groups(1, 2, 3)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "row of -inf"])
def test_bad_logits_are_seen(platform: str, world_size: int, value: float) -> None:
    """NaN or inf in one token's logits (or nothing but -inf): its loss is NaN on every rank, and no other token's.

    So it is in PyTorch, where the difference of two infinities makes the whole row NaN.
    """
    case = make_case(world_size, (4, 8), reduction="none", upstream=np.ones(4))
    logits, wanted = case.logits.copy(), case.logits.copy()
    logits[1, slice(None) if value == -np.inf else 6] = value
    wanted[1] = np.nan
    results = run_distributed(run_case, case.but(logits=logits), platform=platform, world_size=world_size)
    check_results(case.but(logits=wanted), results)


@pytest.mark.contract("G1")
@on_groups(2, 3)
def test_ignored_rows_may_hold_anything(platform: str, world_size: int) -> None:
    """The logits of an ignored token do not matter, NaN or not: its gradient is exactly 0."""
    case = make_case(world_size, (5, 8), reduction="mean", ignored=[1, 2, 3])
    logits = case.logits.copy()
    logits[1], logits[2], logits[3] = np.nan, -np.inf, np.inf
    check(platform, case.but(logits=logits))


@pytest.mark.contract("G1")
@on_groups(2, 4)
def test_loss_is_bitwise_equal_on_all_ranks(platform: str, world_size: int) -> None:
    """The ranks that share the classes agree on the last bit, so that they take the same decisions."""
    results = check(platform, make_case(world_size, (64, 37), reduction="none", spread=5.0))
    for result in results[1:]:
        assert np.array_equal(result["loss"], results[0]["loss"])
