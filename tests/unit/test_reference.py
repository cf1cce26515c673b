"""The NumPy reference against golden values, finite differences and itself at other numbers of shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.loss_parallel import reference

GOLDEN = yaml.safe_load((Path(__file__).parents[1] / "golden" / "loss_golden.yaml").read_text())
EXPECTED = GOLDEN["expected"]
LOGITS, TARGET, WEIGHT = (
    np.array(GOLDEN["logits"], float),
    np.array(GOLDEN["target"]),
    np.array(GOLDEN["weight"]),
)
SIZES = (1, 2, 3, 4, 5, 8)
EXACT = {"rtol": 1e-13, "atol": 1e-14}


def dp2(weight: np.ndarray | None = None, target: np.ndarray = TARGET) -> list[reference.TokenLoss]:
    """Rows 0-1 on one data-parallel rank, rows 2-3 on the other, each cut over two ranks."""
    return [
        reference.cross_entropy(reference.cut(LOGITS[rows], 2, 1), 1, target[rows], weight=weight)
        for rows in (slice(0, 2), slice(2, 4))
    ]


@pytest.mark.parametrize("parts", SIZES)
@pytest.mark.parametrize("name", ["plain", "weight", "label_smoothing_0.1", "weight_and_label_smoothing_0.1"])
def test_golden_losses_and_gradients(name: str, parts: int) -> None:
    tokens = reference.cross_entropy(
        reference.cut(LOGITS, parts, 1),
        1,
        TARGET,
        weight=WEIGHT if "weight" in name else None,
        label_smoothing=0.1 if "smoothing" in name else 0.0,
    )
    expected = EXPECTED[name]
    np.testing.assert_allclose(tokens.loss, expected["none"], **EXACT)
    for reduction in ("sum", "mean"):
        value, ((*grads,),) = reference.reduce_tokens([tokens], reduction)
        np.testing.assert_allclose(value, expected[reduction], **EXACT)
        grad = np.concatenate(grads, 1)
        assert grad.shape == LOGITS.shape and not grad[2].any()  # the ignored token
        if f"grad_abs_sum_of_{reduction}" in expected:
            np.testing.assert_allclose(np.abs(grad).sum(), expected[f"grad_abs_sum_of_{reduction}"], **EXACT)
        if f"grad_l2_of_{reduction}" in expected:
            np.testing.assert_allclose(np.linalg.norm(grad), expected[f"grad_l2_of_{reduction}"], **EXACT)


@pytest.mark.parametrize("parts", SIZES)
def test_golden_lse_entropy_and_z_loss(parts: int) -> None:
    shards = reference.cut(LOGITS, parts, 1)
    np.testing.assert_allclose(reference.lse(shards, 1), EXPECTED["lse"], **EXACT)
    np.testing.assert_allclose(reference.entropy(shards, 1), EXPECTED["entropy"], **EXACT)
    np.testing.assert_allclose(reference.z_loss(shards, 1, 1e-4), EXPECTED["z_loss_1e-4"], **EXACT)
    without_last = LOGITS.copy()
    without_last[:, -1] = -np.inf
    entropy = reference.entropy(reference.cut(without_last, parts, 1), 1)
    np.testing.assert_allclose(entropy, EXPECTED["entropy_last_class_neg_inf"], **EXACT)


@pytest.mark.parametrize("parts", SIZES)
def test_golden_smoothing_underflow(parts: int) -> None:
    shards = reference.cut(np.array([[200.0] + [0.0] * 7]), parts, 1)
    tokens = reference.cross_entropy(shards, 1, [0], label_smoothing=0.1)
    np.testing.assert_allclose(tokens.loss, [GOLDEN["label_smoothing_underflow"]["value"]], **EXACT)


def test_golden_reductions_over_cut_tokens() -> None:
    ignored = np.array([1, 6, -100, -100])
    for expected, parts, reduction in (
        ("dp2_mean", dp2(), "mean"),
        ("dp2_weighted_mean", dp2(WEIGHT), "mean"),
        ("dp2_sum", dp2(), "sum"),
        ("dp2_second_rank_all_ignored_mean", dp2(target=ignored), "mean"),
    ):
        value, grads = reference.reduce_tokens(parts, reduction)
        np.testing.assert_allclose(value, EXPECTED[expected], **EXACT)
        assert [len(shards) for shards in grads] == [2, 2]
    assert np.linalg.norm(
        np.concatenate([np.concatenate(g, 1) for g in reference.reduce_tokens(dp2(), "mean")[1]])
    )
    losses, _ = reference.reduce_tokens(dp2(), "none")
    np.testing.assert_allclose(np.concatenate(losses), EXPECTED["plain"]["none"], **EXACT)


def test_golden_mean_gradient_over_cut_tokens() -> None:
    _, grads = reference.reduce_tokens(dp2(), "mean")
    whole = np.concatenate([np.concatenate(shards, 1) for shards in grads])
    np.testing.assert_allclose(np.linalg.norm(whole), EXPECTED["plain"]["grad_l2_of_mean"], **EXACT)


def test_everything_ignored_is_nan_or_zero_with_gradient_zero() -> None:
    tokens = reference.cross_entropy(reference.cut(LOGITS, 2, 1), 1, np.full(4, -100))
    for reduction, expected in (("mean", np.nan), ("sum", 0.0)):
        value, grads = reference.reduce_tokens([tokens], reduction)
        np.testing.assert_equal(float(value), expected)
        assert not any(np.any(grad) or np.isnan(grad).any() for grad in grads[0])


def test_errors() -> None:
    with pytest.raises(IndexError, match="Target 8 is out of bounds for 8 classes"):
        reference.cross_entropy([LOGITS], 1, [0, 1, 8, 2])
    with pytest.raises(ValueError, match="unknown reduction 'avg'; expected 'none', 'sum' or 'mean'"):
        reference.reduce_tokens([], "avg")


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, np.ndarray, np.ndarray | None]:
    """Logits, class axis, targets and perhaps class weights."""
    token_shape = draw(st.lists(st.integers(0, 3), max_size=3))
    axis = draw(st.integers(0, len(token_shape)))
    classes = draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = [*token_shape[:axis], classes, *token_shape[axis:]]
    target = rng.integers(0, classes, token_shape)
    target = np.where(rng.random(token_shape) < draw(st.sampled_from([0.0, 0.3, 1.0])), -100, target)
    return rng.normal(size=shape) * 5, axis, target, rng.random(classes) if draw(st.booleans()) else None


@given(problems(), st.integers(1, 8), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 0.1]))
def test_shards_change_nothing(problem: tuple, parts: int, smoothing: float, z_loss: float) -> None:
    logits, axis, target, weight = problem
    options = {"weight": weight, "label_smoothing": smoothing, "z_loss": z_loss}
    one = reference.cross_entropy([logits], axis, target, **options)
    many = reference.cross_entropy(reference.cut(logits, parts, axis), axis, target, **options)
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(many.grads, axis), one.grads[0], rtol=1e-10, atol=1e-12)


@given(problems(), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.1]))
def test_gradients_are_finite_differences(problem: tuple, smoothing: float, z_loss: float) -> None:
    logits, axis, target, weight = problem
    direction = np.random.default_rng(0).normal(size=logits.shape)

    def total(step: float) -> float:
        tokens = reference.cross_entropy(
            [logits + step * direction], axis, target, weight=weight, label_smoothing=smoothing, z_loss=z_loss
        )
        return float(tokens.loss.sum())

    tokens = reference.cross_entropy(
        [logits], axis, target, weight=weight, label_smoothing=smoothing, z_loss=z_loss
    )
    slope = (tokens.grads[0] * direction).sum()
    assert slope == pytest.approx((total(1e-5) - total(-1e-5)) / 2e-5, rel=1e-5, abs=1e-6)


@given(problems(), st.integers(1, 4))
def test_nll_of_log_softmax_is_cross_entropy(problem: tuple, parts: int) -> None:
    logits, axis, target, weight = problem
    shards = reference.cut(logits, parts, axis)
    whole = reference.cross_entropy(shards, axis, target, weight=weight)
    nll = reference.nll_loss(reference.log_softmax(shards, axis), axis, target, weight=weight)
    np.testing.assert_allclose(nll.loss, whole.loss, rtol=1e-12, atol=1e-12)
    grads = reference.log_softmax_grad(shards, axis, nll.backward())
    np.testing.assert_allclose(
        np.concatenate(grads, axis), np.concatenate(whole.grads, axis), rtol=1e-10, atol=1e-12
    )
