"""What the tests of PyTorch's modes and backward passes share: the usual case in a worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance.cases import LossCase, expected_results, make_case
from tests.conformance.groups import on_offers
from tests.conformance.loss_calls import call_loss, logits_of, target_of
from tests.harness import this_rank, this_world_size

__all__ = ["assert_near", "expected_of", "in_context", "on_torch", "usual_case"]

on_torch = on_offers({"torch": ("function", "native_function", "decomposed")}, "entry", 2)
"""Two ranks, with the library's DTensors and PyTorch's own."""


def usual_case(entry: str, **fields: Any) -> LossCase:
    """Six tokens, one of them ignored, of eleven classes."""
    return make_case(this_world_size(), (6, 11), entry=entry, ignored=[1], **fields)


def expected_of(case: LossCase) -> tuple[float, np.ndarray]:
    """The global loss, and this rank's gradient."""
    loss, gradient = expected_results(case)[this_rank()]
    return float(loss), gradient


def in_context(case: LossCase, local: Any) -> Any:
    """The loss of local logits as a plain tensor, computed in the context."""
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    with loss_parallel():
        return this_adapter().unwrap(call_loss(case, logits_of(case, local), target_of(case), None))


def assert_near(found: Any, expected: Any) -> None:
    """A tensor against NumPy, to fp32's promise."""
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-7)
