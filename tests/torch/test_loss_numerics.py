"""Numbers that are hard for the PyTorch loss kernels; log_softmax and the decomposed route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.loss_parallel import reference
from tests.torch.loss_calls import (
    CLOSE,
    cross_entropy,
    decomposed,
    log_softmax,
    run,
    same_everywhere,
    tokens,
    whole,
)

pytestmark = pytest.mark.platform("torch")


@pytest.mark.parametrize("offset", (1e4, -1e4))
@pytest.mark.parametrize("world_size, largest_gather", [(1, 8), (2, 8), (2, 1)])
def test_a_shift_of_all_logits_costs_no_accuracy(world_size: int, largest_gather: int, offset: float) -> None:
    rng = np.random.default_rng(6)
    logits = np.round(rng.normal(size=(6, 16)) * 256) / 256  # exact in fp32, shifted or not
    target = rng.integers(0, 16, 6)
    ranks = run(
        cross_entropy, logits + offset, 1, target, label_smoothing=0.1, largest_gather=largest_gather,
        world_size=world_size,
    )  # fmt: skip
    expected = reference.cross_entropy([logits], 1, target, label_smoothing=0.1)
    np.testing.assert_allclose(ranks[0]["loss"], expected.loss, rtol=1e-6)
    np.testing.assert_allclose(whole(ranks, "grad", 1), expected.grads[0], rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("classes", (64, 1 << 16, 1 << 18))  # so that all rows make a chunk, a few do, or one does
@pytest.mark.parametrize("world_size", (1, 2))
def test_rows_of_any_size_beside_each_other(world_size: int, classes: int) -> None:
    # exp(x) itself overflows, underflows, or does neither; on one rank, or on both
    shifts = np.array([0.0, 30.0, 44.0, 46.0, 88.0, 120.0, -15.0, -20.0, -80.0, -110.0, 0.0, 0.0, 50.0, -50.0])
    rng = np.random.default_rng(16)
    logits = np.round(rng.normal(size=(len(shifts), classes)) * 256) / 256 + shifts[:, None]
    logits[10, classes // 2 :] += 100.0
    logits[11, classes // 2 :] -= 100.0
    target = rng.integers(0, classes, len(shifts))
    ranks = run(cross_entropy, logits, 1, target, world_size=world_size)
    expected = reference.cross_entropy([logits], 1, target)
    np.testing.assert_allclose(ranks[0]["loss"], expected.loss, rtol=1e-6)
    np.testing.assert_allclose(whole(ranks, "grad", 1), expected.grads[0], rtol=4e-6, atol=1e-8)


@pytest.mark.parametrize("world_size", (1, 2))
def test_sure_tokens_keep_their_relative_accuracy(world_size: int) -> None:
    logits = np.zeros((3, 8))
    logits[:, 5] = (5.0, 10.0, 14.0)
    target = np.full(3, 5)
    ranks = run(cross_entropy, logits, 1, target, world_size=world_size)
    expected = reference.cross_entropy([logits], 1, target)
    # the loss is log(1 + 7 exp(-x)), whose 1 + ... is rounded to fp32; its gradient is no worse
    np.testing.assert_allclose(ranks[0]["loss"], expected.loss, atol=1.2e-7)
    np.testing.assert_allclose(whole(ranks, "grad", 1), expected.grads[0], atol=1.2e-7)


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_minus_infinity_and_nan_do_as_in_pytorch(world_size: int, smoothing: float) -> None:
    inf, nan = np.inf, np.nan
    logits = np.random.default_rng(7).normal(size=(8, 8))
    logits[0, :4] = -inf  # the whole of rank 0 at P = 2, beside a target elsewhere
    logits[1, :4] = -inf  # ... and the target is among them
    logits[2, :] = -inf
    logits[3, 2] = nan
    logits[4, 6] = inf
    logits[5, 6] = inf
    logits[6, :] = 1e38
    logits[7, 1] = -inf
    target = np.array([6, 1, 3, 5, 6, 2, 4, 0])
    ranks = run(cross_entropy, logits, 1, target, label_smoothing=smoothing, world_size=world_size)
    expected_loss, expected_grad = run(pytorch, logits, target, smoothing, world_size=1)[0]
    np.testing.assert_allclose(ranks[0]["loss"], expected_loss, rtol=1e-6)
    np.testing.assert_allclose(whole(ranks, "grad", 1), expected_grad, rtol=1e-5, atol=1e-7)


def pytorch(logits: np.ndarray, target: np.ndarray, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Runs in a worker: the single-process operator in fp32."""
    import torch

    x = torch.tensor(logits).float().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        x, torch.tensor(target), reduction="none", label_smoothing=smoothing
    )
    loss.sum().backward()
    return loss.detach().double().numpy(), x.grad.double().numpy()


@pytest.mark.contract("G1")
@pytest.mark.parametrize("dtype, bits", [("bfloat16", 7), ("float16", 10)])
def test_half_precision_gradients_are_rounded_once(dtype: str, bits: int) -> None:
    rng = np.random.default_rng(8)
    classes, count = 32768, 6
    logits, target = rng.normal(size=(count, classes)) * 2, rng.integers(0, classes, count)
    upstream = np.full(count, 1000.0)  # keeps fp16 out of its subnormal range
    ranks = run(cross_entropy, logits, 1, target, dtype=dtype, upstream=upstream, world_size=2)
    exact = reference.cross_entropy([rank["logits"] for rank in ranks], 1, target)
    np.testing.assert_allclose(ranks[0]["loss"], exact.loss, rtol=1e-6)
    got, wanted = whole(ranks, "grad", 1), np.concatenate(exact.backward(upstream), 1)
    unit = 2.0 ** (np.floor(np.log2(np.abs(wanted))) - bits)
    if dtype == "float16":
        unit = np.maximum(unit, 2.0**-24)
    assert (np.abs(got - wanted) <= 0.51 * unit).all()
    ideal = np.round(wanted / unit) * unit
    assert np.linalg.norm(got - wanted) <= 1.01 * np.linalg.norm(ideal - wanted)


@pytest.mark.parametrize("world_size", (2, 3))
def test_gradients_are_finite_differences(world_size: int) -> None:
    logits, target, upstream = tokens(9, (2, 5), 1, 5)
    options: dict[str, Any] = {
        "label_smoothing": 0.1,
        "z_loss": 0.03,
        "weight": np.random.default_rng(1).random(5),
    }
    common: dict[str, Any] = {"dtype": "float64", "upstream": upstream, "world_size": world_size, **options}
    grad = whole(run(cross_entropy, logits, 1, target, **common), "grad", 1)
    step = 1e-5
    for at in np.ndindex(*logits.shape):
        change = np.zeros_like(logits)
        change[at] = step
        above, below = (
            run(cross_entropy, logits + s * change, 1, target, **common)[0]["loss"] for s in (1, -1)
        )
        assert grad[at] == pytest.approx(((above - below) * upstream).sum() / (2 * step), abs=1e-8)


# -- log_softmax and the decomposed route ----------------------------------------------------------------


@pytest.mark.contract("K1")
@pytest.mark.parametrize(
    "shape, axis", [((4, 7), 1), ((2, 7, 3, 2), 1), ((7,), 0), ((0, 7), 1), ((2, 3), 1)], ids=str
)
@pytest.mark.parametrize("world_size", (1, 2, 3, 5))
def test_log_softmax_alone(world_size: int, shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(10)
    logits, upstream = rng.normal(size=shape) * 4, rng.normal(size=shape)
    ranks = run(log_softmax, logits, axis, upstream, dtype="float64", world_size=world_size)
    np.testing.assert_allclose(
        whole(ranks, "log_probs", axis), reference.log_softmax([logits], axis)[0], **CLOSE["float64"]
    )
    expected = reference.log_softmax_grad([logits], axis, [upstream])[0]
    np.testing.assert_allclose(whole(ranks, "grad", axis), expected, **CLOSE["float64"])


@pytest.mark.contract("K1")
@pytest.mark.parametrize("out, expected", [(None, "torch.bfloat16"), ("float32", "torch.float32")])
def test_log_softmax_dtype(out: str | None, expected: str) -> None:
    rng = np.random.default_rng(11)
    logits, upstream = np.round(rng.normal(size=(4, 8)) * 8) / 8, np.round(rng.normal(size=(4, 8)) * 8) / 8
    ranks = run(log_softmax, logits, 1, upstream, dtype="bfloat16", out=out, world_size=2)
    assert {rank["dtype"] for rank in ranks} == {expected}
    tolerance = {"rtol": 2.0**-8, "atol": 2e-6}
    np.testing.assert_allclose(
        whole(ranks, "log_probs", 1), reference.log_softmax([logits], 1)[0], **tolerance
    )
    wanted = reference.log_softmax_grad([logits], 1, [upstream])[0]
    np.testing.assert_allclose(whole(ranks, "grad", 1), wanted, **tolerance)


@pytest.mark.contract("K1", "K2")
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("world_size", (1, 2, 3, 5))
def test_nll_of_log_softmax_is_cross_entropy(world_size: int, weighted: bool) -> None:
    logits, target, _ = tokens(12, (3, 7, 2), 1, 7)
    weight = np.random.default_rng(13).random(7) if weighted else None
    ranks = run(decomposed, logits, 1, target, weight=weight, dtype="float64", world_size=world_size)
    expected = reference.cross_entropy([logits], 1, target, weight=weight)
    same_everywhere(ranks, "loss", "token_weight")
    np.testing.assert_allclose(ranks[0]["loss"], expected.loss, **CLOSE["float64"])
    np.testing.assert_allclose(ranks[0]["token_weight"], expected.token_weight, **CLOSE["float64"])
    np.testing.assert_allclose(whole(ranks, "grad", 1), expected.grads[0], **CLOSE["float64"])
