"""The PyTorch loss kernels against the NumPy reference and the golden values, on real process groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from hyper_parallel.loss_parallel import reference
from tests.torch.loss_calls import CLOSE, cross_entropy, run, same_everywhere, tokens, whole

pytestmark = pytest.mark.platform("torch")

GOLDEN = yaml.safe_load((Path(__file__).parents[1] / "golden" / "loss_golden.yaml").read_text())
SIZES = (1, 2, 3, 4, 5, 8)


# -- golden values ---------------------------------------------------------------------------------------


@pytest.mark.contract("G1", "K2", "K3", "P3")
@pytest.mark.parametrize("name", ["plain", "weight", "label_smoothing_0.1", "weight_and_label_smoothing_0.1"])
@pytest.mark.parametrize("world_size", SIZES)
def test_golden(world_size: int, name: str) -> None:
    logits, target = np.array(GOLDEN["logits"], np.float64), np.array(GOLDEN["target"])
    weight = np.array(GOLDEN["weight"]) if "weight" in name else None
    smoothing = 0.1 if "smoothing" in name else 0.0
    ranks = run(
        cross_entropy, logits, 1, target, weight=weight, label_smoothing=smoothing, world_size=world_size
    )
    same_everywhere(ranks, "loss", "token_weight")
    expected, loss, token_weight = GOLDEN["expected"][name], ranks[0]["loss"], ranks[0]["token_weight"]
    np.testing.assert_allclose(loss, expected["none"], rtol=1e-6)
    np.testing.assert_allclose(loss.sum(), expected["sum"], rtol=1e-6)
    np.testing.assert_allclose(loss.sum() / token_weight.sum(), expected["mean"], rtol=1e-6)
    grad = whole(ranks, "grad", 1)
    np.testing.assert_allclose(np.abs(grad).sum(), expected["grad_abs_sum_of_sum"], rtol=1e-6)


@pytest.mark.parametrize("world_size", SIZES)
def test_golden_z_loss(world_size: int) -> None:
    logits, target = np.array(GOLDEN["logits"], np.float64), np.array(GOLDEN["target"])
    ranks = run(cross_entropy, logits, 1, target, z_loss=1e-4, dtype="float64", world_size=world_size)
    kept = target != -100
    expected = (
        np.where(kept, np.array(GOLDEN["expected"]["z_loss_1e-4"]), 0) + GOLDEN["expected"]["plain"]["none"]
    )
    np.testing.assert_allclose(ranks[0]["loss"], expected, rtol=1e-12)


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_smoothing_of_probabilities_that_underflow(world_size: int) -> None:
    logits = np.array([[200.0] + [0.0] * 7])
    ranks = run(cross_entropy, logits, 1, np.array([0]), label_smoothing=0.1, world_size=world_size)
    np.testing.assert_allclose(ranks[0]["loss"], GOLDEN["label_smoothing_underflow"]["value"], rtol=1e-6)


# -- shapes, dtypes, options -----------------------------------------------------------------------------


@pytest.mark.contract("G1", "K2", "K3", "P1", "P2", "P3")
@pytest.mark.parametrize("contiguous", (True, False), ids=("contiguous", "strided"))
@pytest.mark.parametrize(
    "shape, axis",
    [
        ((7,), 0),
        ((6, 7), 1),
        ((7, 6), 0),
        ((2, 7, 3, 4), 1),
        ((2, 3, 7), 2),
        ((0, 7), 1),
        ((3, 2), 1),
        ((1, 1), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2, "z_loss": 0.01}], ids=("plain", "all options")
)
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_against_the_reference(
    world_size: int, shape: tuple[int, ...], axis: int, contiguous: bool, options: dict[str, float]
) -> None:
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        logits, target, upstream = tokens(1, shape, axis, shape[axis])
        weight = np.random.default_rng(2).random(shape[axis]) if options else None
        ranks = run(
            cross_entropy, logits, axis, target, dtype=dtype, weight=weight, upstream=upstream,
            contiguous=contiguous, world_size=world_size, **options,
        )  # fmt: skip
        same_everywhere(ranks, "loss", "token_weight")
        expected = reference.cross_entropy(
            [rank["logits"] for rank in ranks], axis, target, weight=weight, **options
        )
        close = CLOSE.get(dtype, CLOSE["float32"])
        np.testing.assert_allclose(ranks[0]["loss"], expected.loss, **close)
        np.testing.assert_allclose(ranks[0]["token_weight"], expected.token_weight, **close)
        grads = expected.backward(upstream)
        for rank, grad in zip(ranks, grads, strict=True):
            np.testing.assert_allclose(
                rank["grad"], grad, atol=close["atol"], rtol=close["rtol"] + rounding(dtype)
            )


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2, "z_loss": 0.01}], ids=("plain", "all options")
)
@pytest.mark.parametrize("world_size", (2, 3, 5))
def test_the_exchange_of_large_groups(world_size: int, options: dict[str, float]) -> None:
    logits, target, upstream = tokens(14, (5, 7), 1, 7)
    logits[0, 2:6] = -np.inf
    weight = np.random.default_rng(15).random(7) if options else None
    if options:
        target[0] = -100  # its loss is infinite
    ranks = run(
        cross_entropy, logits, 1, target, dtype="float64", weight=weight, upstream=upstream, largest_gather=1,
        world_size=world_size, **options,
    )  # fmt: skip
    same_everywhere(ranks, "loss", "token_weight")
    expected = reference.cross_entropy([logits], 1, target, weight=weight, **options)
    np.testing.assert_allclose(ranks[0]["loss"], expected.loss, **CLOSE["float64"])
    np.testing.assert_allclose(whole(ranks, "grad", 1), expected.backward(upstream)[0], **CLOSE["float64"])


def rounding(dtype: str) -> float:
    """Half a unit in the last place, relative."""
    return {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype, 0.0)


@pytest.mark.contract("P1")
@pytest.mark.parametrize("integer", ("int8", "int16", "int32", "int64", "uint8"))
def test_integer_targets(integer: str) -> None:
    logits, target, _ = tokens(3, (5, 8), 1, 8)
    ignore_index = 255 if integer == "uint8" else -100
    labels = np.where(target == -100, ignore_index, target).astype(integer)
    ranks = run(cross_entropy, logits, 1, labels, ignore_index=ignore_index, dtype="float64", world_size=2)
    np.testing.assert_allclose(
        ranks[0]["loss"], reference.cross_entropy([logits], 1, target).loss, rtol=1e-12
    )


@pytest.mark.parametrize("ignore_index", (0, 3, 1000, -1))
def test_ignore_index_may_be_a_class_or_anything_else(ignore_index: int) -> None:
    logits, _, upstream = tokens(4, (5, 8), 1, 8)
    target = np.array([0, 3, 7, 1, ignore_index])
    ranks = run(
        cross_entropy,
        logits,
        1,
        target,
        ignore_index=ignore_index,
        dtype="float64",
        upstream=upstream,
        world_size=3,
    )
    expected = reference.cross_entropy([logits], 1, target, ignore_index=ignore_index)
    np.testing.assert_allclose(ranks[0]["loss"], expected.loss, rtol=1e-12)
    np.testing.assert_allclose(
        whole(ranks, "grad", 1), expected.backward(upstream)[0], rtol=1e-11, atol=1e-14
    )


@pytest.mark.contract("P2")
@pytest.mark.parametrize("upstream", (1.0, np.inf, np.nan))
def test_all_tokens_ignored(upstream: float) -> None:
    logits = np.random.default_rng(5).normal(size=(4, 8))
    ranks = run(cross_entropy, logits, 1, np.full(4, -100), upstream=upstream, world_size=2)
    for rank in ranks:
        for key in ("loss", "token_weight", "grad"):
            assert not rank[key].any() and not np.isnan(rank[key]).any(), key
