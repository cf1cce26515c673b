"""PyTorch's modes and ways to run a backward pass around the loss: each is right, or a clear error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conformance.cases import LossCase, make_case
from tests.conformance.groups import on_offers
from tests.conformance.loss_calls import call_loss, local_logits, logits_of, run_case, target_of
from tests.harness import run_distributed, this_rank, this_world_size

# "native": PyTorch's own DTensors
on_torch = on_offers({"torch": ("function", "native_function", "decomposed")}, "entry", 2)


def _case(entry: str, **fields: Any) -> LossCase:
    """In a worker: the usual case."""
    return make_case(this_world_size(), (6, 11), entry=entry, ignored=[1], **fields)


def _expected(case: LossCase) -> tuple[float, np.ndarray]:
    """In a worker: the global loss, and this rank's gradient."""
    from tests.conformance.cases import expected_results

    loss, gradient = expected_results(case)[this_rank()]
    return float(loss), gradient


def _loss(case: LossCase, local: Any) -> Any:
    """In a worker: the loss as a plain tensor, in the context."""
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    with loss_parallel():
        return this_adapter().unwrap(call_loss(case, logits_of(case, local), target_of(case), None))


def _close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.contract("G1", "TRAP10")
@on_torch
def test_inference_and_no_grad(platform: str, world_size: int, entry: str) -> None:
    """Case 42: evaluation under inference_mode and no_grad, whichever is entered first."""
    run_distributed(without_gradients, entry, platform=platform, world_size=world_size)


def without_gradients(entry: str) -> None:
    """In a worker."""
    import torch

    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    adapter, case = this_adapter(), _case(entry)
    expected, _ = _expected(case)
    made_outside = local_logits(case)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for local in (local_logits(case), made_outside, made_outside.clone().requires_grad_()):
                loss = _loss(case, local)
                assert not loss.requires_grad
                assert abs(float(loss) - expected) < 1e-5
        with loss_parallel(), mode():
            loss = call_loss(case, logits_of(case, local_logits(case)), target_of(case), None)
            assert abs(float(adapter.unwrap(loss)) - expected) < 1e-5
            if adapter.kind_of(loss) == "ours":  # PyTorch's DTensor has no item() in inference mode
                assert abs(adapter.host_number(loss) - expected) < 1e-5


@pytest.mark.contract("G1")
@on_torch
def test_autocast(platform: str, world_size: int, entry: str) -> None:
    """The loss stays fp32, the logits' gradient keeps their dtype and precision, also where autocast makes them."""
    run_distributed(autocast, entry, platform=platform, world_size=world_size)


def autocast(entry: str) -> None:
    """In a worker."""
    import torch

    for dtype in ("bfloat16", "float32"):
        case = _case(entry, dtype=dtype)
        if dtype == "bfloat16" and entry == "decomposed":
            continue  # outside of autocast its log-probabilities are bf16
        expected, gradient = _expected(case)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            local = local_logits(case).requires_grad_()
            loss = _loss(case, local)
        assert loss.dtype == torch.float32
        loss.backward()
        assert abs(float(loss) - expected) < 1e-5 * abs(expected) + 1e-6
        assert local.grad.dtype == local.dtype
        tolerance = 2.0**-8 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(local.grad.float().numpy(), gradient, rtol=tolerance, atol=1e-7)
    case = _case(entry)
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4), torch.randn(11, 4)
    own = case.slices(this_rank())[1]
    shard = weight[own].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = hidden @ shard.t()
        assert logits.dtype == torch.bfloat16
        loss = _loss(case, logits)
        whole = (hidden @ weight.t()).requires_grad_()
        expected_loss = torch.nn.functional.cross_entropy(whole.float(), torch.tensor(case.target))
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5 if entry != "decomposed" else 1e-2, atol=1e-6)
    assert shard.grad is not None and shard.grad.abs().sum() > 0


@pytest.mark.contract("G1")
@on_torch
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(platform: str, world_size: int, entry: str, reentrant: bool) -> None:
    """The loss in a checkpointed function that enters the context: recomputed in the backward pass, after it.

    With the context around the call only, backward inside it is right, but for PyTorch's own DTensors: in a backward
    pass no mode sees what is recomputed, as after the context. That is refused, or right by PyTorch's own path.
    """
    run_distributed(checkpointed, entry, reentrant, platform=platform, world_size=world_size, timeout=60)


def checkpointed(entry: str, reentrant: bool) -> None:
    """In a worker."""
    from torch.utils.checkpoint import checkpoint

    from hyper_parallel import HyperParallelError
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    case = _case(entry)
    expected, gradient = _expected(case)

    def run(function: Callable[[Any], Any], around: bool, backward_inside: bool) -> None:
        from contextlib import ExitStack

        local = local_logits(case).requires_grad_()
        with ExitStack() as stack:
            if around:
                stack.enter_context(loss_parallel())
            loss = checkpoint(lambda x: function(x * 1.0), local, use_reentrant=reentrant)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        assert abs(float(loss.detach()) - expected) < 1e-5
        _close(local.grad, gradient)

    def without_context(x: Any) -> Any:
        return this_adapter().unwrap(call_loss(case, logits_of(case, x), target_of(case), None))

    run(lambda x: _loss(case, x), around=False, backward_inside=False)
    if not entry.startswith("native"):
        run(without_context, around=True, backward_inside=True)
    for backward_inside in (False, True):
        try:
            run(without_context, around=True, backward_inside=backward_inside)
        except HyperParallelError as error:
            assert "outside loss_parallel()" in str(error) or "S(1)" in str(error)
        except RuntimeError as error:  # PyTorch's
            assert entry.startswith("native") and "mixed torch.Tensor and DTensor" in str(error)


@pytest.mark.contract("G1")
@on_torch
def test_gradient_accumulation(platform: str, world_size: int, entry: str) -> None:
    """Two micro-batches add their gradients; the loss may be divided as a DTensor, and its own backward called."""
    run_distributed(accumulated, entry, platform=platform, world_size=world_size)


def accumulated(entry: str) -> None:
    """In a worker."""
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(entry)
    expected, gradient = _expected(case)
    local = local_logits(case).requires_grad_()
    for step in range(2):
        with loss_parallel():
            loss = call_loss(case, logits_of(case, local), target_of(case), None) / 4
            loss.backward()
        assert abs(loss.item() * 4 - expected) < 1e-5
        _close(local.grad, gradient * (step + 1) / 4)
    local.grad = None
    with loss_parallel():
        first = call_loss(case, logits_of(case, local), target_of(case), None)
        second = call_loss(case, logits_of(case, local * 1.0), target_of(case), None)
    total = first + 0.5 * second
    total.backward()
    _close(local.grad, gradient * 1.5)
    assert f"{float(total):.3f}" == f"{expected * 1.5:.3f}"


@pytest.mark.contract("G1")
@on_torch
def test_second_backward(platform: str, world_size: int, entry: str) -> None:
    """With retain_graph the gradient comes again; without, PyTorch's error."""
    run_distributed(second_backward, entry, platform=platform, world_size=world_size)


def second_backward(entry: str) -> None:
    """In a worker."""
    case = _case(entry)
    _, gradient = _expected(case)
    local = local_logits(case).requires_grad_()
    loss = _loss(case, local)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    _close(local.grad, 2 * gradient)
    loss.backward()
    _close(local.grad, 3 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.contract("G1")
@on_torch
def test_double_backward(platform: str, world_size: int, entry: str) -> None:
    """Case 43: the gradient itself is right under create_graph; differentiating it again is refused in words."""
    run_distributed(double_backward, entry, platform=platform, world_size=world_size)


def double_backward(entry: str) -> None:
    """In a worker."""
    import torch

    case = _case(entry)
    _, gradient = _expected(case)
    local = local_logits(case).requires_grad_()
    (grad,) = torch.autograd.grad(_loss(case, local), local, create_graph=True)
    _close(grad, gradient)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.square().sum().backward()


@pytest.mark.contract("G1", "I2", "TRAP10")
@on_torch
def test_backward_in_another_thread(platform: str, world_size: int, entry: str) -> None:
    """The graph owns all that it needs."""
    run_distributed(backward_in_thread, entry, platform=platform, world_size=world_size)


def backward_in_thread(entry: str) -> None:
    """In a worker."""
    case = _case(entry)
    _, gradient = _expected(case)
    local = local_logits(case).requires_grad_()
    loss = _loss(case, local)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    _close(local.grad, gradient)


@pytest.mark.contract("TRAP11")
@on_torch
def test_logits_used_afterwards(platform: str, world_size: int, entry: str) -> None:
    """Case 44: whoever uses the logits after the loss sees what they were, and both uses add up in the gradient."""
    run_distributed(used_afterwards, entry, platform=platform, world_size=world_size)


def used_afterwards(entry: str) -> None:
    """In a worker."""
    case = _case(entry)
    _, gradient = _expected(case)
    local = local_logits(case).requires_grad_()
    computed = local * 1.0
    version, before = computed._version, computed.detach().clone()
    loss = _loss(case, computed)
    assert computed._version == version and bool((computed == before).all())
    extra = (computed * 2.0).sum()
    (loss + extra).backward()
    assert bool((computed == before).all()) and bool((local == before).all())
    _close(local.grad, gradient + 2.0)


@pytest.mark.contract("G1")
@on_torch
def test_global_settings(platform: str, world_size: int, entry: str) -> None:
    """Another default dtype, deterministic algorithms, anomaly detection: the same numbers."""
    run_distributed(global_settings, entry, platform=platform, world_size=world_size)


def global_settings(entry: str) -> None:
    """In a worker."""
    import torch

    case = _case(entry, weighted=True)
    expected, gradient = _expected(case)

    def same() -> None:
        found = run_case(case)
        assert found["loss_dtype"] == found["grad_dtype"] == "float32"
        np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
        np.testing.assert_allclose(found["grad"], gradient, rtol=1e-5, atol=1e-7)

    torch.set_default_dtype(torch.float64)
    try:
        same()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        same()
    finally:
        torch.use_deterministic_algorithms(False)
    if not entry.startswith("native"):  # PyTorch's DTensor lacks the operator that it takes
        with torch.autograd.detect_anomaly(check_nan=True):
            same()


@pytest.mark.contract("G1")
@on_torch
def test_autograd_grad_and_hooks(platform: str, world_size: int, entry: str) -> None:
    """torch.autograd.grad, and hooks on the logits, see the gradient."""
    run_distributed(grad_and_hooks, entry, platform=platform, world_size=world_size)


def grad_and_hooks(entry: str) -> None:
    """In a worker."""
    import torch

    case = _case(entry)
    _, gradient = _expected(case)
    local = local_logits(case).requires_grad_()
    seen: list[Any] = []
    local.register_hook(lambda g: seen.append(g.clone()))
    (grad,) = torch.autograd.grad(_loss(case, local), local)
    _close(grad, gradient)
    _close(seen[0], gradient)
