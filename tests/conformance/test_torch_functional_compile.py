"""The losses called by name in one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conformance import test_functional as by_name
from tests.conformance import test_linear_loss as linear
from tests.conformance.groups import on_offers
from tests.conformance.loss_calls import mesh_of
from tests.conformance.oracle import reference
from tests.harness import run_distributed, this_rank, this_world_size

pytestmark = pytest.mark.contract("G1", "G2")

GROUPS = {"torch": ("mesh", "Group", "process group", "native mesh")}


def group_of(kind: str) -> Any:
    """In a worker: the ranks, as users say them."""
    from hyper_parallel import get_platform

    mesh = mesh_of((this_world_size(),), ("tp",))
    native = get_platform().native_mesh(mesh)
    return {"mesh": mesh, "Group": mesh.get_group(), "process group": native.get_group(), "native mesh": native}[kind]


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


@on_offers(GROUPS, "group", 2)
def test_cross_entropy(platform: str, world_size: int, group: str) -> None:
    """However the group is said; all options, all results."""
    run_distributed(cross_entropy, group, "aot_eager", platform=platform, world_size=world_size, timeout=120)


@on_offers({"torch": ("process group",)}, "group", 2)
def test_cross_entropy_in_inductor(platform: str, world_size: int, group: str) -> None:
    """The compiler proper."""
    run_distributed(cross_entropy, group, "inductor", platform=platform, world_size=world_size, timeout=200)


def cross_entropy(kind: str, backend: str) -> None:
    """In a worker."""
    import torch

    from hyper_parallel import vocab_parallel_cross_entropy

    group, size, rank = group_of(kind), this_world_size(), this_rank()
    for call in (
        by_name.Call(more=True, known=False),
        by_name.Call(more=True, weighted=True, options={"label_smoothing": 0.2, "z_loss": 0.1}, reduction="sum"),
        by_name.Call(more=True, options={"overlap_blocks": 2}),
        by_name.Call(reduction="none", options={"validate": True, "inplace": True}, dtype="bfloat16"),
    ):
        data = by_name.data_of(call)
        loss, log_prob, entropy, grads = by_name.expected(call, size)
        dtype = getattr(torch, call.dtype)
        target, weight = torch.tensor(data.target), None
        if data.weight is not None:
            weight = torch.tensor(data.weight, dtype=dtype)
        upstream = [torch.tensor(u, dtype=torch.float32) for u in data.upstream]

        def function(x: Any, call: Any = call, target: Any = target, weight: Any = weight) -> Any:
            out = vocab_parallel_cross_entropy(
                x * 1.0,
                target,
                group,
                weight=weight,
                reduction=call.reduction,
                return_log_probs=call.more,
                return_entropy=call.more,
                **call.options,
            )
            return out if call.more else (out,)

        local = torch.tensor(reference.cut(data.logits, size, 1)[rank], dtype=dtype).requires_grad_()
        out = compiled(function, backend)(local)
        sum((u * o).sum() for u, o in zip(upstream, out)).backward()
        for found, wanted in zip(out, (loss, log_prob, entropy)):
            np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-5, atol=1e-5)
        tolerance = 2.0**-8 if call.dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(local.grad.float().numpy(), grads[rank], rtol=tolerance, atol=1e-5)


@on_offers(GROUPS, "group", 2)
def test_linear_cross_entropy(platform: str, world_size: int, group: str) -> None:
    """The gradients of both inputs, also where the logits are computed again."""
    run_distributed(linear_loss, group, platform=platform, world_size=world_size, timeout=120)


def linear_loss(kind: str) -> None:
    """In a worker."""
    import torch

    from hyper_parallel import linear_cross_entropy

    group, size, rank = group_of(kind), this_world_size(), this_rank()
    for reduction in ("mean", "none"):
        call = linear.Call(reduction=reduction, options={"softcap": 2.0, "label_smoothing": 0.1})
        data = linear.data_of(call)
        loss, grads = linear.expected(call)
        target = torch.tensor(data.target)

        def function(x: Any, w: Any, call: Any = call, target: Any = target) -> Any:
            return linear_cross_entropy(
                x, w, target, group, num_classes=11, reduction=call.reduction, **call.options
            )

        hidden = torch.tensor(data.hidden, dtype=torch.float32).requires_grad_()
        weight = torch.tensor(reference.cut(data.weight, size, 0)[rank], dtype=torch.float32).requires_grad_()
        found = compiled(function)(hidden, weight)
        found.backward(torch.tensor(data.upstream, dtype=torch.float32))
        np.testing.assert_allclose(found.detach().numpy(), loss, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(hidden.grad.numpy(), grads["hidden"], rtol=1e-4, atol=1e-5)
        wanted = reference.cut(grads["weight"], size, 0)[rank]
        np.testing.assert_allclose(weight.grad.numpy(), wanted, rtol=1e-4, atol=1e-5)


@on_offers({"torch": ("mean", "none")}, "reduction", 2)
def test_linear_cross_entropy_under_autocast(platform: str, world_size: int, reduction: str) -> None:
    """The compiled one multiplies in autocast's dtype as well; gradients keep the dtypes of their tensors."""
    run_distributed(under_autocast, reduction, platform=platform, world_size=world_size, timeout=120)


def under_autocast(reduction: str) -> None:
    """In a worker."""
    import torch

    from hyper_parallel import linear_cross_entropy

    group, size, rank = group_of("mesh"), this_world_size(), this_rank()
    data = linear.data_of(linear.Call())
    target = torch.tensor(data.target)

    def function(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, target, group, num_classes=11, reduction=reduction)

    def run(function: Callable[..., Any], autocast: bool) -> list[Any]:
        hidden = torch.tensor(data.hidden, dtype=torch.float32).requires_grad_()
        weight = torch.tensor(reference.cut(data.weight, size, 0)[rank], dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = function(hidden, weight)
        loss.sum().backward()
        return [loss.detach(), hidden.grad, weight.grad]

    wide, eager = run(function, False), run(function, True)
    for a, b, c in zip(wide, eager, run(compiled(function), True)):
        assert a.dtype == b.dtype == c.dtype == torch.float32
        assert not torch.equal(a, b) and torch.equal(b, c)


@on_offers({"torch": ("mean", "none")}, "reduction", 1)
def test_linear_cross_entropy_is_differentiable_once(platform: str, world_size: int, reduction: str) -> None:
    """A second derivative raises, by the operators of the compiled graph as by the eager node."""
    messages = run_distributed(second_derivatives, reduction, platform=platform, world_size=world_size)[0]
    assert "linear_cross_entropy cannot be differentiated twice" in messages[0], messages
    assert "no autograd formula" in messages[1], messages


def second_derivatives(reduction: str) -> list[str]:
    """In a worker: the messages."""
    import torch

    from hyper_parallel.platform.functional import LinearLoss
    from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
    from hyper_parallel.platform.torch import _linear_loss, _linear_ops

    data, loss = linear.data_of(linear.Call()), LinearLoss(ClassShard.of(11, None), LossOptions(), reduction)
    messages = []
    for module in (_linear_loss, _linear_ops):
        hidden, weight = (torch.tensor(x, dtype=torch.float32).requires_grad_() for x in (data.hidden, data.weight))
        value = module.linear_loss(hidden, weight, None, torch.tensor(data.target), loss)
        (grad,) = torch.autograd.grad(value.sum(), hidden, create_graph=True)
        with pytest.raises(RuntimeError) as raised:
            grad.square().sum().backward()
        messages.append(str(raised.value))
    return messages
