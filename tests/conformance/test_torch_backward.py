"""Ways to run PyTorch's backward pass through the loss: each is right, or a clear error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.loss_calls import call_loss, local_logits, logits_of, target_of
from tests.conformance.torch_calls import assert_near, expected_of, in_context, on_torch, usual_case
from tests.harness import run_distributed


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

    case = usual_case(entry)
    expected, gradient = expected_of(case)

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
        assert_near(local.grad, gradient)

    def without_context(x: Any) -> Any:
        return this_adapter().unwrap(call_loss(case, logits_of(case, x), target_of(case), None))

    run(lambda x: in_context(case, x), around=False, backward_inside=False)
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

    case = usual_case(entry)
    expected, gradient = expected_of(case)
    local = local_logits(case).requires_grad_()
    for step in range(2):
        with loss_parallel():
            loss = call_loss(case, logits_of(case, local), target_of(case), None) / 4
            loss.backward()
        assert abs(loss.item() * 4 - expected) < 1e-5
        assert_near(local.grad, gradient * (step + 1) / 4)
    local.grad = None
    with loss_parallel():
        first = call_loss(case, logits_of(case, local), target_of(case), None)
        second = call_loss(case, logits_of(case, local * 1.0), target_of(case), None)
    total = first + 0.5 * second
    total.backward()
    assert_near(local.grad, gradient * 1.5)
    assert f"{float(total):.3f}" == f"{expected * 1.5:.3f}"


@pytest.mark.contract("G1")
@on_torch
def test_second_backward(platform: str, world_size: int, entry: str) -> None:
    """With retain_graph the gradient comes again; without, PyTorch's error."""
    run_distributed(second_backward, entry, platform=platform, world_size=world_size)


def second_backward(entry: str) -> None:
    """In a worker."""
    case = usual_case(entry)
    _, gradient = expected_of(case)
    local = local_logits(case).requires_grad_()
    loss = in_context(case, local)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert_near(local.grad, 2 * gradient)
    loss.backward()
    assert_near(local.grad, 3 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.contract("G1")
@on_torch
def test_double_backward(platform: str, world_size: int, entry: str) -> None:
    """The gradient itself is right under create_graph; differentiating it again is refused in words."""
    run_distributed(double_backward, entry, platform=platform, world_size=world_size)


def double_backward(entry: str) -> None:
    """In a worker."""
    import torch

    case = usual_case(entry)
    _, gradient = expected_of(case)
    local = local_logits(case).requires_grad_()
    (grad,) = torch.autograd.grad(in_context(case, local), local, create_graph=True)
    assert_near(grad, gradient)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.square().sum().backward()


@pytest.mark.contract("G1", "I2", "TRAP10")
@on_torch
def test_backward_in_another_thread(platform: str, world_size: int, entry: str) -> None:
    """The graph owns all that it needs."""
    run_distributed(backward_in_thread, entry, platform=platform, world_size=world_size)


def backward_in_thread(entry: str) -> None:
    """In a worker."""
    case = usual_case(entry)
    _, gradient = expected_of(case)
    local = local_logits(case).requires_grad_()
    loss = in_context(case, local)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_near(local.grad, gradient)


@pytest.mark.contract("G1")
@on_torch
def test_autograd_grad_and_hooks(platform: str, world_size: int, entry: str) -> None:
    """torch.autograd.grad, and hooks on the logits, see the gradient."""
    run_distributed(grad_and_hooks, entry, platform=platform, world_size=world_size)


def grad_and_hooks(entry: str) -> None:
    """In a worker."""
    import torch

    case = usual_case(entry)
    _, gradient = expected_of(case)
    local = local_logits(case).requires_grad_()
    seen: list[Any] = []
    local.register_hook(lambda g: seen.append(g.clone()))
    (grad,) = torch.autograd.grad(in_context(case, local), local)
    assert_near(grad, gradient)
    assert_near(seen[0], gradient)
