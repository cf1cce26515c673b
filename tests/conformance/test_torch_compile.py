"""torch.compile around, inside and across the context: the right path each time, and no gathered logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conformance.cases import LossCase, expected_results, make_case
from tests.conformance.groups import on_offers
from tests.conformance.loss_calls import call_loss, local_logits, logits_of, mesh_of, placements_of, target_of
from tests.harness import run_distributed, this_rank, this_world_size

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
on_torch = on_offers({"torch": ("function", "module", "native_function", "decomposed")}, "entry", 2)

pytestmark = pytest.mark.contract("G1", "G3")


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()
    return torch.compile(function, backend=backend)


def _case(entry: str) -> LossCase:
    return make_case(this_world_size(), (6, 11), entry=entry, ignored=[1])


def _check(case: LossCase, function: Callable[[Any, Any], Any]) -> None:
    """In a worker: ``function(logits, target)`` is the loss, its gradient is right, and little is sent."""
    from tests.conformance.adapters import this_adapter

    adapter = this_adapter()
    loss, gradient = expected_results(case)[this_rank()]
    local = local_logits(case).requires_grad_()
    with adapter.record_collectives() as sent:
        found = adapter.unwrap(function(logits_of(case, local), target_of(case)))
    found.backward()
    np.testing.assert_allclose(found.detach().numpy(), loss, rtol=1e-5)
    np.testing.assert_allclose(local.grad.numpy(), gradient, rtol=1e-5, atol=1e-7)
    assert sum(c.bytes for c in sent) <= 12 * 6 + 2 * 64, sent


@on_torch
@backends
def test_compiled_in_the_context(platform: str, world_size: int, entry: str, backend: str) -> None:
    """A compiled function that takes logits and gives the loss, called in the context."""
    run_distributed(compiled_in_context, entry, backend, platform=platform, world_size=world_size, timeout=120)


def compiled_in_context(entry: str, backend: str) -> None:
    """In a worker."""
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(entry)
    compiled = _compiled(lambda logits, target: call_loss(case, logits, target, None), backend)

    def inside(logits: Any, target: Any) -> Any:
        with loss_parallel():
            return compiled(logits, target)

    _check(case, inside)
    _check(case, inside)


@on_torch
@backends
def test_context_in_the_compiled_function(platform: str, world_size: int, entry: str, backend: str) -> None:
    """A compiled function that enters the context itself, and does arithmetic on the loss."""
    run_distributed(context_in_compiled, entry, backend, platform=platform, world_size=world_size, timeout=120)


def context_in_compiled(entry: str, backend: str) -> None:
    """In a worker."""
    from hyper_parallel import is_loss_parallel_active
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(entry)

    def function(logits: Any, target: Any) -> Any:
        with loss_parallel():
            loss = call_loss(case, logits, target, None)
        return loss * 1.0

    compiled = _compiled(function, backend)
    _check(case, compiled)
    assert not is_loss_parallel_active()
    _check(case, compiled)


@on_torch
def test_model_and_loss_compiled_together(platform: str, world_size: int, entry: str) -> None:
    """Plain work of this rank before the loss is compiled, the loss in it is right."""
    run_distributed(model_and_loss, entry, platform=platform, world_size=world_size, timeout=120)


def model_and_loss(entry: str) -> None:
    """In a worker."""
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    case = _case(entry)
    adapter, target = this_adapter(), target_of(case)
    mesh, placements, shape = mesh_of(case.mesh, case.mesh_names), placements_of(case.shards), case.logits.shape
    logits_of(case, local_logits(case))  # what is made once
    loss, gradient = expected_results(case)[this_rank()]

    def function(local: Any) -> Any:
        scaled = (local * 2.0).relu() / 2.0 - (-local).relu()
        logits = adapter.wrap(entry, scaled, mesh, placements, shape)
        return adapter.unwrap(call_loss(case, logits, target, None)) * 1.0

    compiled = _compiled(function, "aot_eager")
    for _ in range(2):
        local = local_logits(case).requires_grad_()
        with loss_parallel():
            found = compiled(local)
        found.backward()
        np.testing.assert_allclose(found.detach().numpy(), loss, rtol=1e-5)
        np.testing.assert_allclose(local.grad.numpy(), gradient, rtol=1e-5, atol=1e-7)


@on_torch
def test_compiled_outside_run_inside(platform: str, world_size: int, entry: str) -> None:
    """Compiled by a first call out of the context, then run in it, and out again: the right path each time.

    Out of the context class-sharded logits of ours are an error; PyTorch's own are PyTorch's affair.
    """
    run_distributed(outside_then_inside, entry, platform=platform, world_size=world_size, timeout=120)


def outside_then_inside(entry: str) -> None:
    """In a worker."""
    from hyper_parallel import HyperParallelError
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(entry)
    compiled = _compiled(lambda logits, target: call_loss(case, logits, target, None), "aot_eager")

    def inside(logits: Any, target: Any) -> Any:
        with loss_parallel():
            return compiled(logits, target)

    def outside() -> None:
        logits, target = logits_of(case, local_logits(case)), target_of(case)
        if entry.startswith("native"):
            from tests.conformance.adapters import this_adapter

            if entry == "native_function":  # whatever PyTorch makes of it, it must not be a wrong number
                found = this_adapter().host_number(compiled(logits, target_as_native(case)))
                assert abs(found - float(expected_results(case)[0][0])) < 1e-5
            return
        with pytest.raises(HyperParallelError, match=r"S\(1\)@tp"):
            compiled(logits, target)

    outside()
    _check(case, inside)
    outside()
    _check(case, inside)


def target_as_native(case: LossCase) -> Any:
    """PyTorch's operators do not mix plain tensors and DTensors."""
    return target_of(case.but(target_as="replicated"))


@on_torch
def test_replicated_logits_compiled(platform: str, world_size: int, entry: str) -> None:
    """Replicated logits: the plain loss, compiled in or out of the context."""
    run_distributed(replicated, entry, platform=platform, world_size=world_size, timeout=120)


def replicated(entry: str) -> None:
    """In a worker."""
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(entry).but(shards=(None,), target_as="replicated")
    compiled = _compiled(lambda logits, target: call_loss(case, logits, target, None), "aot_eager")

    def inside(logits: Any, target: Any) -> Any:
        with loss_parallel():
            return compiled(logits, target)

    _check(case, compiled)
    _check(case, inside)
    _check(case, compiled)


@pytest.mark.parametrize(("platform", "world_size"), [pytest.param("torch", 2, id="torch-2")])
def test_plain_code_compiled_in_the_context(platform: str, world_size: int) -> None:
    """Compiled code without a DTensor is compiled as ever, in one graph, in the context too."""
    run_distributed(plain_code, platform=platform, world_size=world_size, timeout=120)


def plain_code() -> None:
    """In a worker."""
    import torch
    import torch.nn.functional as F

    from hyper_parallel.loss_parallel import loss_parallel

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, t: F.cross_entropy(x * 2.0, t), backend="aot_eager", fullgraph=True)
    x, target = torch.randn(4, 7), torch.tensor([0, 1, -100, 6])
    expected = F.cross_entropy(x * 2.0, target)
    with loss_parallel():
        torch.testing.assert_close(compiled(x, target), expected)
    torch.testing.assert_close(compiled(x, target), expected)
