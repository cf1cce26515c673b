"""The exchange of one block of tokens beside the arithmetic of the next, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hyper_parallel.loss_parallel import reference
from hyper_parallel.platform.loss_kernels import ClassShard
from tests.torch import loss_calls
from tests.torch.loss_calls import CLOSE, class_shard, cross_entropy, run, same_everywhere, tokens, whole

pytestmark = [pytest.mark.platform("torch"), pytest.mark.contract("G1", "G2")]


@dataclass(frozen=True)
class Case:
    """``sent``: the blocks that are exchanged when three are asked for, and the collectives after them.

    ``ignored``: which tokens, all others have class 1; None: some, at random.
    """

    shape: tuple[int, ...] = (7, 9)
    axis: int = 1
    sent: tuple[int, tuple[str, ...]] = (3, ())
    ignored: slice | None = None
    shift: float = 0.0
    weighted: bool = False
    call: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case(),
    "everything": Case(weighted=True, call={"label_smoothing": 0.2, "z_loss": 0.01}),
    "entropy and log-probabilities": Case(call={"entropy": True, "log_probs": True, "label_smoothing": 0.1}),
    "images": Case((2, 9, 3, 4), call={"contiguous": False}),
    "classes first": Case((9, 7), 0, weighted=True, call={"label_smoothing": 0.2}),
    "strided, bf16": Case(call={"contiguous": False, "dtype": "bfloat16"}),
    "float64": Case(call={"dtype": "float64"}),
    "fewer tokens than blocks": Case((2, 9), sent=(2, ())),
    "one token": Case((9,), 0, sent=(0, ("all_gather",)), ignored=slice(0)),
    "no token": Case((0, 9), sent=(0, ("all_gather",))),
    "fewer classes than ranks": Case((7, 1), weighted=True, call={"z_loss": 0.1}),
    "a block ignored": Case((6, 9), ignored=slice(2)),
    "all ignored": Case(ignored=slice(None), weighted=True, call={"label_smoothing": 0.2}),
    "large gaps, in one block": Case(shift=100.0, sent=(3, ("all_gather",))),
    "MAX, then SUM": Case(weighted=True, sent=(3, ("all_reduce",)), call={"label_smoothing": 0.2, "largest_gather": 0}),
}


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, world_size: int) -> None:
    """The oracle's loss and gradient, equal bits on all ranks; one exchange a block, none backward."""
    case, call = CASES[name], dict(CASES[name].call)
    classes = case.shape[case.axis]
    full, target, upstream = tokens(1, case.shape, case.axis, classes)
    if case.ignored is not None:
        target = np.ones_like(target)
        target.reshape(-1)[case.ignored] = -100
    if case.shift:  # the first class of the rank that holds the target's
        full[-1, 0] += case.shift
        target[-1] = 2
    weight = np.random.default_rng(2).uniform(0.5, 2.0, classes).astype(np.float32) if case.weighted else None
    ranks = run(counted, full, case.axis, target, 3, weight=weight, upstream=upstream, **call, world_size=world_size)
    same_everywhere(ranks, "loss", "token_weight")
    formula = {k: call[k] for k in ("label_smoothing", "z_loss") if k in call}
    exact = reference.cut(whole(ranks, "logits", case.axis), world_size, case.axis)
    right = reference.cross_entropy(exact, case.axis, target, weight=weight, **formula)
    close = CLOSE[call["dtype"] if call.get("dtype") == "float64" else "float32"]
    np.testing.assert_allclose(ranks[0]["loss"], right.loss, **close)
    rounding = {"rtol": 2.0**-8, "atol": 1e-6} if call.get("dtype") == "bfloat16" else close
    for rank, grad in zip(ranks, right.backward(upstream), strict=True):
        np.testing.assert_allclose(rank["grad"], grad, **rounding)
        blocks, after = case.sent
        start = "start_all_reduce" if name == "MAX, then SUM" else "start_all_gather"
        assert rank["sent"] == [*[start] * blocks, *after]


def counted(full: np.ndarray, axis: int, target: np.ndarray, blocks: int, **call: Any) -> dict[str, Any]:
    """In a worker: :func:`cross_entropy`, the ranks' class ranges known, and the collectives that it ran."""
    from hyper_parallel.platform.torch import collectives

    sent: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        run_it = getattr(collectives, name)
        return lambda *args: (sent.append(name), run_it(*args))[1]

    def shard(num_classes: int) -> ClassShard:
        return ClassShard.of(num_classes, class_shard(num_classes).group)

    names = ("all_gather", "all_reduce", "start_all_gather", "start_all_reduce")
    with (
        patch.multiple(collectives, **{name: noted(name) for name in names}),
        patch.object(loss_calls, "class_shard", shard),
    ):
        result = cross_entropy(full, axis, target, overlap_blocks=blocks, validate=False, **call)
    return result | {"sent": sent}


@pytest.mark.parametrize("world_size", (1, 2))
def test_order(world_size: int) -> None:
    """A block is sent before the next one is computed on, and nothing is waited for before the last is sent."""
    blocks = ["arithmetic", "start"] * 3 + ["wait"] * 3
    expected = blocks if world_size > 1 else ["arithmetic"]
    assert run(order, world_size=world_size) == [expected] * world_size


def order() -> list[str]:
    """In a worker."""
    from hyper_parallel.platform.torch import _loss_overlap, collectives

    events: list[str] = []
    start, statistics = collectives.start_all_gather, _loss_overlap.shard_statistics

    def started(*args: Any) -> Callable[[], Any]:
        events.append("start")
        wait = start(*args)
        return lambda: (events.append("wait"), wait())[1]

    def computed(*args: Any, **kwargs: Any) -> Any:
        events.append("arithmetic")
        return statistics(*args, **kwargs)

    with (
        patch.object(collectives, "start_all_gather", started),
        patch.object(_loss_overlap, "shard_statistics", computed),
    ):
        full, target, _ = tokens(1, (7, 9), 1, 9)
        cross_entropy(full, 1, target, overlap_blocks=3)
    return events
