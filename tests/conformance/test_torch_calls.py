"""How PyTorch code can call the loss: positions and keywords, leaves, operators of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.cases import LossCase, expected_results, make_case
from tests.conformance.loss_calls import local_logits, logits_of, target_of, weight_of
from tests.harness import run_distributed, this_rank, this_world_size

on_torch = pytest.mark.parametrize(("platform", "world_size"), [pytest.param("torch", 2, id="torch-2")])


def _case(**fields: Any) -> LossCase:
    """In a worker: a weighted case with an ignored token."""
    return make_case(this_world_size(), (4, 7), weighted=True, ignored=[1], **fields)


def _assert_loss(loss: Any, case: LossCase) -> None:
    expected, _ = expected_results(case)[this_rank()]
    np.testing.assert_allclose(loss.to_local().detach().numpy(), expected, rtol=1e-5)


@pytest.mark.contract("P1")
@on_torch
def test_positions_and_keywords(platform: str, world_size: int) -> None:
    """Every position means what it means in PyTorch, and every argument has its name."""
    run_distributed(positions_and_keywords, platform=platform, world_size=world_size)


def positions_and_keywords() -> None:
    """In a worker."""
    import torch
    import torch.nn.functional as F

    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(reduction="sum")
    logits, target, weight = logits_of(case, local_logits(case)), target_of(case), weight_of(case)
    with loss_parallel():
        for call in (
            lambda: F.cross_entropy(logits, target, weight, None, -100, None, "sum", 0.0),
            lambda: F.cross_entropy(logits, target, weight, False),
            lambda: F.cross_entropy(input=logits, target=target, weight=weight, reduction="sum"),
            lambda: F.cross_entropy(target=target, input=logits, weight=weight, reduction="sum"),
            lambda: F.nll_loss(F.log_softmax(logits, 1), target, weight, None, -100, None, "sum"),
            lambda: F.nll_loss(F.log_softmax(logits, -1, 3, None), target, weight, reduction="sum"),
            lambda: F.nll_loss(torch.log_softmax(logits, dim=1), target, weight, reduction="sum"),
            lambda: F.nll_loss(logits.log_softmax(-1), target, weight, reduction="sum"),
            lambda: F.nll_loss(
                input=F.log_softmax(input=logits, dim=-1), target=target, weight=weight, reduction="sum"
            ),
            lambda: F.nll_loss(torch.special.log_softmax(logits, 1), target, weight, reduction="sum"),
            lambda: torch.nn.CrossEntropyLoss(weight, reduction="sum")(logits, target),
            lambda: torch.nn.NLLLoss(weight, reduction="sum")(torch.nn.LogSoftmax(1)(logits), target),
        ):
            _assert_loss(call(), case)
        with pytest.raises(TypeError):
            F.cross_entropy(logits, target, weights=weight)


@pytest.mark.contract("K1")
@on_torch
def test_dtype_of_log_softmax(platform: str, world_size: int) -> None:
    """``dtype=`` as in PyTorch: the result has it, the gradient has the logits' dtype."""
    run_distributed(dtype_of_log_softmax, platform=platform, world_size=world_size)


def dtype_of_log_softmax() -> None:
    """In a worker."""
    import torch
    import torch.nn.functional as F

    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(dtype="bfloat16")
    local = local_logits(case).requires_grad_()
    with loss_parallel():
        log_probs = F.log_softmax(logits_of(case, local), 1, dtype=torch.float32)
        loss = F.nll_loss(log_probs, target_of(case), weight_of(case))
    assert log_probs.dtype == loss.dtype == torch.float32
    loss.backward()
    _assert_loss(loss, case)
    assert local.grad is not None and local.grad.dtype == torch.bfloat16
    gradient = expected_results(case)[this_rank()][1]
    np.testing.assert_allclose(local.grad.float().numpy(), gradient, rtol=2.0**-8 + 1e-5, atol=1e-7)


@pytest.mark.contract("G1")
@on_torch
def test_leaf_dtensors(platform: str, world_size: int) -> None:
    """A leaf DTensor gets a DTensor as gradient; ``distribute_tensor`` gives a whole gradient back."""
    run_distributed(leaf_dtensors, platform=platform, world_size=world_size)


def leaf_dtensors() -> None:
    """In a worker."""
    import torch
    import torch.nn.functional as F

    from hyper_parallel import DTensor, Shard, distribute_tensor
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case()
    gradient = expected_results(case)[this_rank()][1]
    logits = logits_of(case, local_logits(case)).requires_grad_()
    whole = torch.tensor(case.logits, dtype=torch.float32, requires_grad=True)
    with loss_parallel():
        F.cross_entropy(logits, target_of(case), weight_of(case)).backward()
        cut = distribute_tensor(whole, logits.device_mesh, [Shard(1)])
        F.cross_entropy(cut, target_of(case), weight_of(case)).backward()
    grad = logits.grad
    assert isinstance(grad, DTensor) and grad.placements == logits.placements and grad.shape == logits.shape
    np.testing.assert_allclose(grad.to_local().numpy(), gradient, rtol=1e-5, atol=1e-7)
    assert type(whole.grad) is torch.Tensor
    np.testing.assert_allclose(whole.grad.numpy()[case.slices(this_rank())], gradient, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(grad.full_tensor().numpy(), whole.grad.numpy())


@pytest.mark.contract("I3")
@on_torch
def test_registered_operator(platform: str, world_size: int) -> None:
    """A function of the user's own that PyTorch leads to us is the loss, once its name is registered."""
    run_distributed(registered_operator, platform=platform, world_size=world_size)


def my_fused_loss(input: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Any:
    """A function that asks its arguments first, as PyTorch's own do."""
    from torch.overrides import handle_torch_function, has_torch_function

    if has_torch_function((input, target)):
        return handle_torch_function(my_fused_loss, (input, target), input, target, weight=weight, reduction=reduction)
    raise AssertionError("the ordinary path")


def registered_operator() -> None:
    """In a worker."""
    from hyper_parallel import UnsupportedOperatorError, register_loss_parallel_op_names
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case()
    logits, target, weight = logits_of(case, local_logits(case)), target_of(case), weight_of(case)
    with loss_parallel():
        with pytest.raises(UnsupportedOperatorError, match="my_fused_loss"):
            my_fused_loss(logits, target, weight)
        register_loss_parallel_op_names("my_fused_loss")
        _assert_loss(my_fused_loss(logits, target, weight), case)
