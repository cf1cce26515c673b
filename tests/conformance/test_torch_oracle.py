"""The oracle itself, against PyTorch on one device in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.cases import REDUCTIONS, LossCase, expected_results, make_case
from tests.conformance.oracle import reference, round_to
from tests.harness import run_distributed

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
F = torch.nn.functional
pytestmark = [pytest.mark.platform("torch"), pytest.mark.contract("G1")]


def in_torch(case: LossCase) -> tuple[np.ndarray, np.ndarray]:
    """Loss and gradient of the whole logits, in float64."""
    logits = torch.tensor(case.logits, requires_grad=True)
    options = dict(case.options) | ({} if case.ignore_index is None else {"ignore_index": case.ignore_index})
    weight = None if case.weight is None else torch.tensor(case.weight)
    loss = F.cross_entropy(
        logits, torch.tensor(case.target), weight=weight, reduction=case.reduction or "mean", **options
    )
    loss.backward(torch.as_tensor(np.broadcast_to(case.upstream, tuple(loss.shape)).copy()))
    return loss.detach().numpy(), logits.grad.numpy()


def assert_oracle_is_right(case: LossCase) -> None:
    [(loss, gradient)] = expected_results(case)
    expected_loss, expected_gradient = in_torch(case)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 7, 4), (2, 7, 3, 2), (0, 7), (0, 7, 2)], ids=str)
def test_shapes(shape: tuple[int, ...], weighted: bool, reduction: str) -> None:
    ignored = [0] if np.prod(shape) > 7 else []
    assert_oracle_is_right(make_case(1, shape, weighted=weighted, reduction=reduction, ignored=ignored))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, 2, None])
def test_ignore_index(ignore_index: int | None, reduction: str) -> None:
    """All tokens ignored: NaN for mean, with a gradient of 0."""
    for ignored in ([1], [0, 1, 2]):
        case = make_case(1, (3, 5), ignored=ignored, reduction=reduction, ignore_index=ignore_index, weighted=True)
        assert_oracle_is_right(case)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_zero_weights(reduction: str) -> None:
    """Weights that add up to 0: NaN for mean, with a gradient of NaN."""
    case = make_case(1, (3, 5), weighted=True, reduction=reduction)
    assert_oracle_is_right(case.but(weight=np.zeros(5)))
    if reduction == "mean":
        assert np.isnan(expected_results(case.but(weight=np.zeros(5)))[0][1]).any()


@pytest.mark.filterwarnings("ignore:.*size_average and reduce args will be deprecated")
@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
def test_deprecated_arguments(size_average: bool | None, reduce: bool | None) -> None:
    options = {"size_average": size_average, "reduce": reduce}
    case = make_case(1, options=options, weighted=True, ignored=[1])
    if case.effective_reduction == "none":
        case = case.but(upstream=np.linspace(-1.0, 1.0, 6))
    assert_oracle_is_right(case)


def test_minus_infinity() -> None:
    case = make_case(1, (4, 6), reduction="none", ignored=[3])
    logits, target = case.logits.copy(), case.target.copy()
    logits[0, 0] = logits[1, :4] = -np.inf
    target[:2] = [1, 5]
    assert_oracle_is_right(case.but(logits=logits, target=target))
    logits[2, target[2]] = -np.inf  # the loss is inf
    np.testing.assert_array_equal(expected_results(case.but(logits=logits, target=target))[0][0][2], np.inf)
    assert_oracle_is_right(case.but(logits=logits, target=target))


def test_log_softmax() -> None:
    rng = np.random.default_rng(0)
    logits, upstream = rng.standard_normal((2, 3, 7, 2)), rng.standard_normal((2, 3, 7, 2))
    x = torch.tensor(logits, requires_grad=True)
    out = torch.log_softmax(x, 2)
    out.backward(torch.tensor(upstream))
    np.testing.assert_allclose(np.concatenate(reference.log_softmax(reference.cut(logits, 3, 2), 2), 2), out.detach())
    grads = reference.log_softmax_grad(reference.cut(logits, 3, 2), 2, reference.cut(upstream, 3, 2))
    np.testing.assert_allclose(np.concatenate(grads, 2), x.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding(dtype: str) -> None:
    """The suite's roundings are PyTorch's."""
    values = np.concatenate([np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-6, 4, 0.01), [0.0]])
    expected = torch.tensor(values).float().to(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(round_to(np.float32(values), dtype), expected)


def test_one_process_is_the_framework_itself() -> None:
    """A mesh of one rank gives what PyTorch gives, too."""
    found = run_distributed(one_rank, platform="torch", world_size=1)
    assert found == [True]


def one_rank() -> bool:
    from tests.conformance.loss_calls import run_case

    case = make_case(1, (5, 7), weighted=True, ignored=[2], dtype="float64")
    found, (loss, gradient) = run_case(case), in_torch(case)
    return np.allclose(found["loss"], loss, rtol=1e-12) and np.allclose(found["grad"], gradient, rtol=1e-12)
