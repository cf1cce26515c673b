"""K1 to K3 themselves, on plain local tensors and any partition of the classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.groups import FLOATS, on_groups, on_offers
from tests.conformance.loss_calls import mesh_of
from tests.conformance.oracle import assert_close, reference, round_to
from tests.harness import run_distributed, this_rank, this_world_size

# Widths of the ranks' shards: nothing says that they are even, nor that the empty ones come last.
_WIDTHS = {1: (9,), 2: (2, 7), 3: (4, 0, 5), 4: (0, 1, 6, 2)}


def class_shard(widths: tuple[int, ...], ranges_known: bool = False) -> Any:
    """In a worker: this rank's classes."""
    from hyper_parallel.platform.loss_kernels import ClassShard

    rank, group = this_rank(), mesh_of((this_world_size(),), ("tp",)).get_group("tp")
    stops = [sum(widths[: r + 1]) for r in range(len(widths))]
    ranges = tuple((stop - width, stop) for stop, width in zip(stops, widths))
    return ClassShard(*ranges[rank], sum(widths), group, ranges if ranges_known else None)


def inputs(dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits ``[2, 9, 3]`` (classes in dim 1), target, weight, an upstream gradient a token, and one a logit."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 9, (2, 3))
    target[1, 0] = -100
    return (
        round_to(rng.standard_normal((2, 9, 3)) * 3, dtype),
        target,
        round_to(rng.uniform(0.25, 2.0, 9), dtype),
        round_to(rng.standard_normal((2, 3)), dtype),
        round_to(rng.standard_normal((2, 9, 3)), dtype),
    )


def split(full: np.ndarray, widths: tuple[int, ...]) -> list[np.ndarray]:
    """Shards of dim 1."""
    return np.split(full, np.cumsum(widths)[:-1], 1)


@pytest.mark.contract("K1", "P3")
@on_offers(FLOATS, "dtype")
def test_log_softmax(platform: str, world_size: int, dtype: str) -> None:
    """Local log-probabilities and the gradient for any upstream; one exchange forward, one all-reduce backward."""
    widths = _WIDTHS[world_size]
    logits, _, _, _, upstream = inputs(dtype)
    found = run_distributed(k1, dtype, widths, platform=platform, world_size=world_size)
    values = reference.log_softmax(split(logits, widths), 1)
    grads = reference.log_softmax_grad(split(logits, widths), 1, split(upstream, widths))
    for rank, result in enumerate(found):
        assert_close(result["forward_only"], values[rank], dtype, "log-probabilities", scale=20.0)
        assert_close(result["value"], values[rank], dtype, "log-probabilities", scale=20.0)
        assert_close(result["grad"], grads[rank], dtype, "gradient", scale=20.0)
        share = np.exp(values[rank]).sum(1)
        assert_close(np.reshape(result["share"], share.shape), share, "float32", "share of the probability")
        if world_size > 1:
            forward, backward = result["collectives"]
            assert len(forward) == 1 and [name for name, _ in backward] == ["all_reduce"]


def k1(dtype: str, widths: tuple[int, ...]) -> dict[str, Any]:
    """In a worker."""
    from hyper_parallel import get_platform

    adapter, kernels, shard = this_adapter(), get_platform().loss_kernels, class_shard(widths)
    logits, _, _, _, upstream = inputs(dtype)
    local = adapter.tensor(split(logits, widths)[this_rank()], dtype)
    log_probs, share = kernels.distributed_log_softmax(local, 1, shard)
    forward = []

    with adapter.record_collectives() as seen:

        def function(x: Any) -> Any:
            result = kernels.log_softmax(x, 1, shard, validate=False)
            forward.extend((c.name, c.bytes) for c in seen)
            return result

        done = adapter.value_and_grad(function, local, split(upstream, widths)[this_rank()])
    backward = [(c.name, c.bytes) for c in seen][len(forward) :]
    return {
        "forward_only": adapter.numpy(log_probs),
        "share": adapter.numpy(share),
        "value": done.value,
        "grad": done.grad,
        "collectives": (forward, backward),
    }


@pytest.mark.contract("K2", "K3", "P3", "G2")
@on_offers(FLOATS, "dtype")
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("ranges_known", [False, True], ids=["own range", "all ranges"])
def test_nll_forward_and_fused_backward(
    platform: str, world_size: int, dtype: str, weighted: bool, ranges_known: bool
) -> None:
    """Loss and weight of each token; then the gradient of the local logits, without a collective.

    Knowing every rank's classes, the ranks send less; the numbers are the same.
    """
    widths = _WIDTHS[world_size]
    logits, target, weight, upstream, _ = inputs(dtype)
    found = run_distributed(k2_k3, dtype, widths, weighted, ranges_known, platform=platform, world_size=world_size)
    tokens = reference.cross_entropy(split(logits, widths), 1, target, weight=weight if weighted else None)
    grads = tokens.backward(upstream)
    statistics = "float64" if dtype == "float64" else "float32"
    for rank, result in enumerate(found):
        assert_close(result["loss"], tokens.loss, statistics, "loss", scale=20.0)
        assert_close(result["token_weight"], tokens.token_weight, statistics, "token weight")
        assert_close(result["grad"], grads[rank], dtype, "gradient", scale=4.0)
        assert result["backward_collectives"] == []
        if world_size > 1:
            numbers = (2 if ranges_known else 3) * target.size
            assert sum(size for _, size in result["forward_collectives"]) == numbers * np.dtype(statistics).itemsize
        assert np.array_equal(result["loss"], found[0]["loss"])


def k2_k3(dtype: str, widths: tuple[int, ...], weighted: bool, ranges_known: bool) -> dict[str, Any]:
    """In a worker."""
    from hyper_parallel import get_platform
    from hyper_parallel.platform.loss_kernels import LossOptions

    adapter, kernels, shard = this_adapter(), get_platform().loss_kernels, class_shard(widths, ranges_known)
    logits, target, weight, upstream, _ = inputs(dtype)
    local = adapter.tensor(split(logits, widths)[this_rank()], dtype)
    labels = adapter.tensor(target, "int64")
    weights = adapter.tensor(weight, dtype) if weighted else None
    with adapter.record_collectives() as sent:
        loss, token_weight, state = kernels.distributed_nll_loss_forward(
            local, 1, labels, shard, weights, LossOptions()
        )
    with adapter.record_collectives() as seen:
        statistics = adapter.dtype(loss)
        grad = kernels.fused_nll_log_softmax_backward(adapter.tensor(upstream, statistics), local, 1, state)
    return {
        "loss": adapter.numpy(loss),
        "token_weight": adapter.numpy(token_weight),
        "grad": adapter.numpy(grad),
        "forward_collectives": [(c.name, c.bytes) for c in sent],
        "backward_collectives": [c.name for c in seen],
    }


@pytest.mark.contract("K2", "TRAP4")
@on_groups(1, 2, 4)
def test_unchecked_target_out_of_range(platform: str, world_size: int) -> None:
    """Without validation such a token's loss and gradient row are NaN, not 0; the others are right."""
    widths = _WIDTHS[world_size]
    logits, _, _, upstream, _ = inputs("float32")
    found = run_distributed(unchecked, widths, platform=platform, world_size=world_size)
    target = inputs("float32")[1]
    tokens = reference.cross_entropy(split(logits, widths), 1, target)
    for rank, (loss, grad) in enumerate(found):
        expected, expected_grad = tokens.loss.copy(), tokens.backward(upstream)[rank].copy()
        expected[0, 1], expected_grad[0, :, 1] = np.nan, np.nan
        assert_close(loss, expected, "float32", "loss", scale=20.0)
        assert_close(grad, expected_grad, "float32", "gradient", scale=4.0)


def unchecked(widths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """In a worker."""
    from hyper_parallel import get_platform
    from hyper_parallel.platform.loss_kernels import LossOptions

    adapter, kernels, shard = this_adapter(), get_platform().loss_kernels, class_shard(widths)
    logits, target, _, upstream, _ = inputs("float32")
    target[0, 1] = 9
    labels = adapter.tensor(target, "int64")

    def function(x: Any) -> Any:
        return kernels.cross_entropy(x, 1, labels, shard, None, LossOptions(validate=False))[0]

    done = adapter.value_and_grad(function, adapter.tensor(split(logits, widths)[this_rank()], "float32"), upstream)
    return done.value, done.grad


@pytest.mark.contract("K2", "E1")
@on_groups(2, 3)
def test_class_count_that_does_not_add_up(platform: str, world_size: int) -> None:
    """Gathered logits taken for shards are found out by the sum of the ranks' class counts."""
    for kind, message in run_distributed(
        gathered_as_shards, platform=platform, world_size=world_size, expect_error=True
    ):
        assert kind == "LossParallelLayoutError"
        assert f"{9 * world_size} together; expected each of the 9 classes once" in message


def gathered_as_shards() -> None:
    """In a worker: every rank holds all nine classes, and calls them its shard."""
    from hyper_parallel import get_platform
    from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions

    adapter, group = this_adapter(), mesh_of((this_world_size(),), ("tp",)).get_group("tp")
    logits, target, *_ = inputs("float32")
    get_platform().loss_kernels.cross_entropy(
        adapter.tensor(logits, "float32"),
        1,
        adapter.tensor(target, "int64"),
        ClassShard(0, 9, 9, group),
        None,
        LossOptions(validate=True),
    )
