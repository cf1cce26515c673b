"""Faults that were found once, each with the smallest program that showed it. PyTorch, two ranks."""

from __future__ import annotations

import contextvars
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    DTensor,
    ParallelismConfig,
    Replicate,
    Shard,
    distribute_tensor,
    get_train_context,
    init_device_mesh,
    is_loss_parallel_active,
    loss_parallel,
)
from tests.harness import Raised, run_distributed, this_rank

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
F = torch.nn.functional
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
pytestmark = pytest.mark.platform("torch")

TARGET = torch.tensor([0, 6, 3, -100, 5])


def run(function: Any, *args: Any, expect_error: bool = False) -> list[Any]:
    results: list[Any] = run_distributed(
        function, *args, platform="torch", world_size=2, expect_error=expect_error
    )
    return results


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def shard(full: torch.Tensor, dim: int) -> DTensor:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return distribute_tensor(full, mesh, [Shard(dim)]).requires_grad_(full.is_floating_point())


# -- reach of the context: generators that are not closed last in, first out -----------------------------------------


def _within() -> Any:
    with loss_parallel():
        yield


@pytest.mark.contract("G3", "L1", "TRAP5")
def test_interleaved_generators_leave_nothing_on() -> None:
    first, second = _within(), _within()
    next(first)
    next(second)
    first.close()
    assert is_loss_parallel_active()  # the second is still open
    second.close()
    assert not is_loss_parallel_active()


@pytest.mark.contract("G3", "I2")
def test_a_generator_may_be_closed_in_another_context() -> None:
    generator = _within()
    contextvars.copy_context().run(next, generator)
    generator.close()
    assert not is_loss_parallel_active()


# -- one rank's call is refused by the kernel only ---------------------------------------------------------------------


def weight_with_gradient_on_one_rank() -> None:
    weight = torch.ones(7, dtype=torch.float64, requires_grad=this_rank() == 1)
    with loss_parallel():
        F.cross_entropy(shard(random(5, 7), 1), TARGET, weight=weight)


def complex_target_on_one_rank() -> None:
    target = TARGET.to(torch.complex64) if this_rank() == 1 else TARGET
    with loss_parallel():
        F.cross_entropy(shard(random(5, 7), 1), target)


@pytest.mark.contract("P1")
@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (weight_with_gradient_on_one_rank, "LossParallelUnsupportedError", "rank 1: the loss is not differentiable"),
        (complex_target_on_one_rank, "TypeError", "rank 1: the target is complex64"),
    ],
)
def test_all_ranks_refuse_what_one_rank_got_wrong(call: Any, kind: str, says: str) -> None:
    raised: list[Raised] = run(call, expect_error=True)
    assert {found.type for found in raised} == {kind}
    assert all(says in found.message for found in raised), raised


def frozen_weight_without_gradients() -> tuple[float, float]:
    weight = torch.ones(7, dtype=torch.float64, requires_grad=True)
    with loss_parallel(), torch.no_grad():
        loss = F.cross_entropy(shard(random(5, 7), 1), TARGET, weight=weight)
        return loss.item(), F.cross_entropy(random(5, 7), TARGET, weight=weight).item()


@pytest.mark.contract("P1")
def test_class_weights_that_require_gradients_are_fine_without_any() -> None:
    for loss, expected in run(frozen_weight_without_gradients):
        assert loss == pytest.approx(expected, rel=1e-12)


# -- the decomposed operators ------------------------------------------------------------------------------------------


def aten_nll(reduction: int) -> tuple[np.ndarray, np.ndarray]:
    log_probs = random(5, 7).log_softmax(1)
    with loss_parallel():
        found = torch.ops.aten.nll_loss(shard(log_probs, 1), TARGET, None, reduction, -100)
    expected = torch.ops.aten.nll_loss(log_probs, TARGET, None, reduction, -100)
    return found.full_tensor().detach().numpy(), expected.numpy()


@pytest.mark.contract("I3")
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_aten_nll_loss_numbers_its_reductions(reduction: int) -> None:
    for found, expected in run(aten_nll, reduction):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def log_softmax_to_float64() -> tuple[np.ndarray, np.ndarray]:
    logits = random(5, 7, dtype=torch.float32)
    with loss_parallel():
        found = F.log_softmax(shard(logits, 1), -1, dtype=torch.float64)
    expected = F.log_softmax(logits, -1, dtype=torch.float64)
    return found.full_tensor().detach().numpy(), expected.numpy()


@pytest.mark.contract("K1")
def test_log_softmax_of_float32_in_float64_is_exact_to_float64() -> None:
    for found, expected in run(log_softmax_to_float64):
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


# -- activation checkpointing repeats the loss where the context is not seen -------------------------------------------


def checkpointed(kind: str, other_thread: bool) -> float:
    """The largest difference of the gradients of hidden state and weight."""
    hidden, weight = random(5, 4).requires_grad_(), random(7, 4).requires_grad_()

    def loss_of(h: Any, w: Any) -> Any:
        logits = F.linear(h, w)
        if kind == "cross_entropy":
            return F.cross_entropy(logits, TARGET)
        log_probs = F.log_softmax(logits, -1)
        return -(log_probs.exp() * log_probs).sum()

    loss_of(hidden, weight).backward()
    own_weight = shard(weight.detach(), 0)
    own_hidden = distribute_tensor(hidden.detach(), own_weight.device_mesh, [Replicate()]).requires_grad_()
    with loss_parallel():
        loss = checkpoint(loss_of, own_hidden, own_weight, use_reentrant=False)
    if other_thread:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    pairs = ((own_hidden, hidden), (own_weight, weight))
    return max(float((own.grad.full_tensor() - whole.grad).abs().max()) for own, whole in pairs)


@pytest.mark.contract("G3")
@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("kind", ["cross_entropy", "entropy"])
def test_a_checkpointed_loss_is_repeated_outside_the_context(kind: str, other_thread: bool) -> None:
    for difference in run(checkpointed, kind, other_thread):
        assert difference < 1e-12


def decomposed_outside_with_fallback() -> tuple[np.ndarray, np.ndarray, int]:
    full = random(5, 7).requires_grad_()
    target = torch.tensor([0, 6, 3, -100, 5])
    config = ParallelismConfig(tensor_parallel_degree=2, loss_parallel_fallback_on_layout_error=True)
    with get_train_context(False, config)(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        loss = F.nll_loss(F.log_softmax(distribute_tensor(full, mesh, [Shard(1)]), dim=-1), target)
    loss.backward()
    expected = F.cross_entropy(full.detach().requires_grad_(), target)
    assert full.grad is not None
    return loss.to_local().detach().numpy() - expected.detach().numpy(), full.grad.numpy(), len(caught)


@pytest.mark.contract("C3")
def test_the_fallback_covers_the_decomposed_loss() -> None:
    full = random(5, 7).requires_grad_()
    F.cross_entropy(full, torch.tensor([0, 6, 3, -100, 5])).backward()
    for difference, gradient, warned in run(decomposed_outside_with_fallback):
        assert abs(difference) < 1e-12 and warned == 1
        np.testing.assert_allclose(gradient, full.grad, rtol=1e-12, atol=1e-14)


def log_softmax_over_the_same_dim_in_two_spellings() -> np.ndarray:
    with loss_parallel():
        return F.log_softmax(shard(random(5, 7), 1), dim=(-1, 1)[this_rank()]).full_tensor().detach().numpy()


@pytest.mark.contract("K1")
def test_a_negative_dim_is_the_dim_that_it_means() -> None:
    expected = torch.log_softmax(random(5, 7), 1)
    for result in run(log_softmax_over_the_same_dim_in_two_spellings):
        np.testing.assert_allclose(result, expected, rtol=1e-12)
