"""PyTorch's modes and settings around the loss: each is right."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.loss_calls import call_loss, local_logits, logits_of, run_case, target_of
from tests.conformance.torch_calls import assert_near, expected_of, in_context, on_torch, usual_case
from tests.harness import run_distributed, this_rank


@pytest.mark.contract("G1", "TRAP10")
@on_torch
def test_inference_and_no_grad(platform: str, world_size: int, entry: str) -> None:
    """Evaluation under inference_mode and no_grad, whichever is entered first."""
    run_distributed(without_gradients, entry, platform=platform, world_size=world_size)


def without_gradients(entry: str) -> None:
    """In a worker."""
    import torch

    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    adapter, case = this_adapter(), usual_case(entry)
    expected, _ = expected_of(case)
    made_outside = local_logits(case)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for local in (local_logits(case), made_outside, made_outside.clone().requires_grad_()):
                loss = in_context(case, local)
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
        case = usual_case(entry, dtype=dtype)
        if dtype == "bfloat16" and entry == "decomposed":
            continue  # outside of autocast its log-probabilities are bf16
        expected, gradient = expected_of(case)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            local = local_logits(case).requires_grad_()
            loss = in_context(case, local)
        assert loss.dtype == torch.float32
        loss.backward()
        assert abs(float(loss) - expected) < 1e-5 * abs(expected) + 1e-6
        assert local.grad.dtype == local.dtype
        tolerance = 2.0**-8 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(local.grad.float().numpy(), gradient, rtol=tolerance, atol=1e-7)
    case = usual_case(entry)
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4), torch.randn(11, 4)
    own = case.slices(this_rank())[1]
    shard = weight[own].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = hidden @ shard.t()
        assert logits.dtype == torch.bfloat16
        loss = in_context(case, logits)
        whole = (hidden @ weight.t()).requires_grad_()
        expected_loss = torch.nn.functional.cross_entropy(whole.float(), torch.tensor(case.target))
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5 if entry != "decomposed" else 1e-2, atol=1e-6)
    assert shard.grad is not None and shard.grad.abs().sum() > 0


@pytest.mark.contract("TRAP11")
@on_torch
def test_logits_used_afterwards(platform: str, world_size: int, entry: str) -> None:
    """Whoever uses the logits after the loss sees what they were, and both uses add up in the gradient."""
    run_distributed(used_afterwards, entry, platform=platform, world_size=world_size)


def used_afterwards(entry: str) -> None:
    """In a worker."""
    case = usual_case(entry)
    _, gradient = expected_of(case)
    local = local_logits(case).requires_grad_()
    computed = local * 1.0
    version, before = computed._version, computed.detach().clone()
    loss = in_context(case, computed)
    assert computed._version == version and bool((computed == before).all())
    extra = (computed * 2.0).sum()
    (loss + extra).backward()
    assert bool((computed == before).all()) and bool((local == before).all())
    assert_near(local.grad, gradient + 2.0)


@pytest.mark.contract("G1")
@on_torch
def test_global_settings(platform: str, world_size: int, entry: str) -> None:
    """Another default dtype, deterministic algorithms, anomaly detection: the same numbers."""
    run_distributed(global_settings, entry, platform=platform, world_size=world_size)


def global_settings(entry: str) -> None:
    """In a worker."""
    import torch

    case = usual_case(entry, weighted=True)
    expected, gradient = expected_of(case)

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
