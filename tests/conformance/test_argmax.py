"""The most likely classes of class-sharded logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.groups import FLOATS, on_groups, on_offers
from tests.conformance.loss_calls import mesh_of
from tests.conformance.oracle import reference, round_to
from tests.harness import run_distributed, this_rank, this_world_size

pytestmark = pytest.mark.contract("G2")


@on_offers(FLOATS, "dtype", 1, 2, 4)
def test_argmax_and_topk(platform: str, world_size: int, dtype: str) -> None:
    """Many equals: the lowest class first; NaN is largest; minus infinity still has its class."""
    rng = np.random.default_rng(5)
    logits = round_to(rng.integers(-2, 3, (2, 5, 11)), dtype)
    logits[0, 1] = -np.inf
    logits[0, 2, 7] = np.nan
    logits[1, 0, 3] = -0.0
    order = np.lexsort((np.arange(11) * np.ones_like(logits), -logits, ~np.isnan(logits)), axis=-1)
    found = run_distributed(best, logits, dtype, platform=platform, world_size=world_size)
    for argmax, results in found:
        assert np.array_equal(argmax, order[..., 0])
        for k, (values, classes) in results.items():
            assert np.array_equal(classes, order[..., :k]), k
            assert np.array_equal(values, np.take_along_axis(logits, order, -1)[..., :k], equal_nan=True)


def best(logits: np.ndarray, dtype: str) -> Any:
    """In a worker."""
    from hyper_parallel import vocab_parallel_argmax, vocab_parallel_topk

    adapter, size = this_adapter(), this_world_size()
    local = adapter.tensor(reference.cut(logits, size, 2)[this_rank()], dtype)
    group = mesh_of((size,), ("tp",))["tp"]
    results = {k: vocab_parallel_topk(local, k, group, num_classes=11) for k in (1, 4, 11)}
    argmax = adapter.numpy(vocab_parallel_argmax(local, group))
    return argmax, {k: (adapter.numpy(v), adapter.numpy(c)) for k, (v, c) in results.items()}


@on_groups(1, 2)
def test_too_many(platform: str, world_size: int) -> None:
    """More classes wanted than there are: an error on every rank."""
    for kind, message in run_distributed(too_many, platform=platform, world_size=world_size, expect_error=True):
        assert kind == "ValueError" and "found k=5 and 4 classes" in message


def too_many() -> None:
    """In a worker."""
    from hyper_parallel import vocab_parallel_topk

    size = this_world_size()
    local = this_adapter().tensor(reference.cut(np.zeros((2, 4)), size, 1)[this_rank()], "float32")
    vocab_parallel_topk(local, 5, mesh_of((size,), ("tp",))["tp"])
