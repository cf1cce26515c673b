"""What the loss allocates on PyTorch's CPU: no copy of the logits, in whatever dtype."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.cases import LossCase, make_case
from tests.conformance.loss_calls import call_loss, local_logits, logits_of, target_of
from tests.harness import run_distributed

_TOKENS, _CLASSES = 256, 16384


@pytest.mark.contract("G2", "K3")
@pytest.mark.parametrize(("platform", "world_size"), [pytest.param("torch", 2, id="torch-2")])
@pytest.mark.parametrize("entry", ["function", "native_function"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak(platform: str, world_size: int, entry: str, dtype: str) -> None:
    """The forward pass needs a chunk and numbers a token, the backward pass the gradient and a chunk."""
    case = make_case(world_size, (_TOKENS, _CLASSES), entry=entry, dtype=dtype)
    size = _TOKENS * _CLASSES // world_size * (4 if dtype == "float32" else 2)
    for forward, backward in run_distributed(peaks, case, platform=platform, world_size=world_size):
        assert forward <= 3 * 2**20 + 64 * _TOKENS, f"{forward} bytes in the forward pass"
        assert size <= backward <= size + 3 * 2**20 + 64 * _TOKENS, f"{backward} bytes in the backward pass"


def peaks(case: LossCase) -> tuple[int, int]:
    """In a worker: the most that was allocated at once in each pass, beyond what was there before."""
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    local, target = local_logits(case).requires_grad_(), target_of(case)
    logits = logits_of(case, local)
    adapter = this_adapter()

    def forward() -> Any:
        with loss_parallel():
            return adapter.unwrap(call_loss(case, logits, target, None))

    forward().backward()  # whatever is made once
    local.grad = None
    first, loss = _peak(forward)
    second, _ = _peak(loss.backward)
    return first, second


def _peak(function: Any) -> tuple[int, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    now = most = 0
    for event in sorted(
        (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
    return most, result
