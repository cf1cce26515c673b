"""The trainer's losses on each kind of logits, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.loss_parallel import loss_parallel
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss, HeadLoss
from tests.harness import run_distributed

KINDS = ("sharded", "replicated", "plain")
SHAPE = (2, 5, 11)
VALID = 64


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(7)
    labels = generator.integers(0, SHAPE[-1], SHAPE[:2])
    labels[1, 2:4] = -100
    return generator.standard_normal(SHAPE).astype(np.float32), labels


def expected(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """Sum over tokens that count, divided by VALID, and its gradient."""
    wide = logits.astype(np.float64)
    lse = np.log(np.exp(wide).sum(-1))
    counts = labels >= 0
    hit = np.eye(SHAPE[-1])[np.maximum(labels, 0)]
    loss = ((lse - (wide * hit).sum(-1)) * counts).sum() / VALID
    return float(loss), (np.exp(wide - lse[..., None]) - hit) * counts[..., None] / VALID


def value_and_gradient(function: Any, x: np.ndarray) -> tuple[float, np.ndarray]:
    platform = get_platform()
    if platform.name == "torch":
        leaf = platform.from_numpy(x).requires_grad_()
        value = function(leaf)
        value.backward()
        return float(value.detach()), leaf.grad.numpy()
    import mindspore

    value, gradient = mindspore.value_and_grad(function)(platform.from_numpy(x))
    return float(value.asnumpy()), gradient.asnumpy()


def loss_of(kind: str) -> tuple[float, np.ndarray]:
    """In a worker: the loss, and the gradient of all logits as this rank sees it."""
    from tests.harness.platforms import this_rank, this_world_size

    logits, labels = make_batch()
    platform, size = get_platform(), this_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    start, stop = chunk_ranges(SHAPE[-1], size)[this_rank()]
    target = platform.from_numpy(labels)

    def loss(x: Any) -> Any:
        given = x
        if kind == "sharded":
            given = DTensor.from_local(x, mesh, [Shard(-1)], shape=SHAPE)
        elif kind == "replicated":
            given = DTensor.from_local(x, mesh, [Replicate()])
        with loss_parallel():
            return CrossEntropyLoss()(given, target, VALID)

    own = logits[..., start:stop].copy() if kind == "sharded" else logits
    value, gradient = value_and_gradient(loss, own)
    if kind != "sharded":
        return value, gradient
    whole = np.zeros(SHAPE, np.float32)
    whole[..., start:stop] = gradient
    return value, whole


@pytest.mark.contract("L2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_cross_entropy_of_every_kind_of_logits(platform: str, kind: str) -> None:
    results = run_distributed(loss_of, kind, platform=platform, world_size=2, timeout=60)
    loss, gradient = expected(*make_batch())
    for value, _ in results:
        assert value == pytest.approx(loss, rel=1e-6)
    parts = [g for _, g in results]
    found = sum(parts) if kind == "sharded" else parts[0]
    np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-7)


def chunked_on_one_rank() -> tuple[float, float, float, list[int]]:
    """In a worker: whole and chunked losses, the largest difference of gradients, tokens of each call of the head."""
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(2, 10, 4, requires_grad=True)
    labels = torch.randint(0, 7, (2, 10))
    labels[0, :3] = -100
    head = torch.nn.Linear(4, 7)
    calls: list[int] = []

    def forward(x: Any) -> Any:
        calls.append(x.shape[1])
        return head(x)

    results = []
    for loss in (
        CrossEntropyLoss()(head(hidden), labels, VALID),
        ChunkedCrossEntropyLoss(4)(head, forward, hidden, labels, VALID),
    ):
        hidden.grad = head.weight.grad = None
        loss.backward()
        assert hidden.grad is not None and head.weight.grad is not None
        results.append((loss.item(), hidden.grad.clone(), head.weight.grad.clone()))
    (whole, *before), (chunked, *after) = results
    gaps = [(a - b).abs().max().item() for a, b in zip(before, after, strict=True)]
    return whole, chunked, max(gaps), calls


@pytest.mark.platform("torch")
def test_chunked_equals_whole_and_holds_one_part_at_a_time() -> None:
    whole, chunked, gap, calls = run_distributed(chunked_on_one_rank, platform="torch", world_size=1)[0]
    assert chunked == pytest.approx(whole, rel=1e-6)
    assert gap < 1e-7
    assert sorted(calls) == sorted([3, 3, 3, 1] * 2)  # forward, and again in backward


def attach_errors() -> list[str]:
    """In a worker."""
    import torch

    class Headless(torch.nn.Module):
        pass

    messages = []
    loss: HeadLoss = ChunkedCrossEntropyLoss()
    for action in (lambda: loss.attach(Headless()), lambda: loss.expecting(None, 1).__enter__()):
        try:
            action()
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.platform("torch")
def test_a_model_without_a_last_layer_is_named() -> None:
    first, second = run_distributed(attach_errors, platform="torch", world_size=1)[0]
    assert first.startswith("Headless has no last layer to put ChunkedCrossEntropyLoss in the place of")
    assert second == "ChunkedCrossEntropyLoss was not attached to a model"
