"""The loss with and without the compiled kernels: rows that are longer than their blocks, ignored, or not finite."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hyper_parallel.platform.native import rows as native
from tests.conformance.adapters import this_adapter
from tests.conformance.groups import FLOATS, on_offers
from tests.conformance.oracle import assert_close, reference, round_to
from tests.conformance.test_kernels import class_shard
from tests.harness import run_distributed, this_rank

_WIDTHS = {1: (5003,), 2: (3001, 2002), 3: (2500, 0, 2503), 4: (17, 2000, 986, 2000)}
_TOKENS = 23


def _inputs(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits ``[23, 5003]``, targets, an upstream gradient a token; of ignored tokens one has NaN, one is infinite."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((_TOKENS, 5003)) * 4 + rng.uniform(-50, 50, (_TOKENS, 1))
    logits[4, ::7] = -np.inf
    target = rng.integers(0, 2500, _TOKENS) * 2 + 1
    logits[5, target[5]] += 40.0  # a probability of nearly 1
    target[[1, 2, 9]] = -100
    logits[1, 30], logits[2, 2600] = np.nan, np.inf
    target[4] = 1
    return round_to(logits, dtype), target, round_to(rng.standard_normal(_TOKENS), "float32")


def _split(full: np.ndarray, widths: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(full, np.cumsum(widths)[:-1], 1)


@pytest.mark.contract("K2", "K3")
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "operators"])
@on_offers(FLOATS, "dtype")
def test_loss_and_gradient(platform: str, world_size: int, dtype: str, compiled: bool) -> None:
    if compiled and native.load_library() is None:
        pytest.skip("needs a C compiler when the library is installed")
    widths = _WIDTHS[world_size]
    logits, target, upstream = _inputs(dtype)
    shards = _split(logits, widths)
    kept = target != -100
    finite = [np.where(kept[:, None], shard, 0.0) for shard in shards]
    tokens = reference.cross_entropy(finite, 1, target)
    grads = tokens.backward(upstream)
    statistics = "float64" if dtype == "float64" else "float32"
    for rank, result in enumerate(
        run_distributed(_loss, dtype, widths, compiled, platform=platform, world_size=world_size)
    ):
        assert result["rows taken"] == (compiled and dtype != "float64" and widths[rank] > 0)
        assert_close(result["loss"], tokens.loss, statistics, "loss", scale=20.0)
        assert_close(result["grad"], grads[rank], dtype, "gradient", scale=4.0)
        assert_close(result["in place"], grads[rank], dtype, "gradient in place", scale=4.0)
        assert (result["grad"][~kept] == 0).all()


def _loss(dtype: str, widths: tuple[int, ...], compiled: bool) -> dict[str, Any]:
    """In a worker."""
    from hyper_parallel import get_platform
    from hyper_parallel.platform.loss_kernels import LossOptions

    adapter, kernels, shard = this_adapter(), get_platform().loss_kernels, class_shard(widths)
    logits, target, upstream = _inputs(dtype)
    found = {}
    native.row_kernels.cache_clear()
    calls = []
    original = native.RowKernels.gradients

    def counted(self: native.RowKernels, *args: Any, **kwargs: Any) -> None:
        calls.append(args)
        original(self, *args, **kwargs)

    try:
        with (
            patch.dict(os.environ, {} if compiled else {native.SWITCH: "0"}),
            patch.object(native.RowKernels, "gradients", counted),
        ):
            for name, options in (("grad", LossOptions()), ("in place", LossOptions(inplace=True))):
                local = adapter.tensor(_split(logits, widths)[this_rank()], dtype)
                loss, _, state = kernels.distributed_nll_loss_forward(
                    local, 1, adapter.tensor(target, "int64"), shard, None, options
                )
                g = adapter.tensor(upstream, adapter.dtype(loss))
                found[name] = adapter.numpy(kernels.fused_nll_log_softmax_backward(g, local, 1, state))
    finally:
        native.row_kernels.cache_clear()
    return {**found, "loss": adapter.numpy(loss), "rows taken": len(calls) == 2}
