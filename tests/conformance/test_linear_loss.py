"""Last layer and loss in one: value and gradients of every rank against the oracle."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.groups import FLOATS, on_groups, on_offers
from tests.conformance.loss_calls import mesh_of
from tests.conformance.oracle import assert_close, reference, round_to
from tests.harness import run_distributed, this_rank, this_world_size

pytestmark = pytest.mark.contract("G1")


@dataclass(frozen=True)
class Call:
    """One call; ``tokens`` is the target's shape."""

    tokens: tuple[int, ...] = (3, 5)
    classes: int = 11
    width: int = 8
    dtype: str = "float32"
    reduction: str = "mean"
    bias: bool = False
    ignored: bool = True
    sequence_dim: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    hidden: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    target: np.ndarray
    upstream: np.ndarray


def data_of(call: Call) -> Data:
    rng = np.random.default_rng(7)
    target = rng.integers(0, call.classes, call.tokens)
    if call.ignored:
        target.reshape(-1)[1] = -100
    return Data(
        round_to(rng.standard_normal((*call.tokens, call.width)), call.dtype),
        round_to(rng.standard_normal((call.classes, call.width)), call.dtype),
        round_to(rng.standard_normal(call.classes), call.dtype) if call.bias else None,
        target,
        rng.standard_normal(call.tokens if call.reduction == "none" else ()),
    )


def expected(call: Call) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Loss and whole gradients, float64."""
    data, axis = data_of(call), len(call.tokens)
    logits = data.hidden @ data.weight.T + (0.0 if data.bias is None else data.bias)
    softcap = call.options.get("softcap")
    capped = logits if softcap is None else softcap * np.tanh(logits / softcap)
    formula = {k: v for k, v in call.options.items() if k in ("label_smoothing", "z_loss")}
    tokens = reference.cross_entropy([capped], axis, data.target, **formula)
    loss, _ = reference.reduce_tokens([tokens], call.reduction)
    scale: Any = 1.0 / tokens.token_weight.sum() if call.reduction == "mean" else 1.0
    grad = tokens.backward(data.upstream * scale)[0]
    if softcap is not None:
        grad = grad * (1.0 - (capped / softcap) ** 2)
    rows, hidden = grad.reshape(-1, call.classes), data.hidden.reshape(-1, call.width)
    grads = {"hidden": grad @ data.weight, "weight": rows.T @ hidden, "bias": rows.sum(0)}
    return np.asarray(loss[0] if call.reduction == "none" else loss), grads


def check(platform: str, world_size: int, call: Call) -> None:
    wanted = ["hidden", "weight", *(["bias"] if call.bias else [])]
    found = run_distributed(run_call, call, wanted, platform=platform, world_size=world_size, timeout=60)
    loss, grads = expected(call)
    statistics = "float64" if call.dtype == "float64" else "float32"
    scale = 20.0 * max(1, int(np.prod(call.tokens)))
    for rank, result in enumerate(found):
        for name in wanted:
            whole = grads[name]
            if name != "hidden":
                whole = reference.cut(whole, world_size, 0)[rank]
            elif call.sequence_dim is not None:
                whole = reference.cut(whole, world_size, call.sequence_dim)[rank]
            value, grad, dtypes = result[name]
            assert_close(value, loss, statistics, "loss", scale=scale)
            assert_close(grad, whole, call.dtype, f"gradient of {name} on rank {rank}", scale=scale)
            assert dtypes == (statistics, call.dtype)
            assert np.array_equal(value, found[0][name][0], equal_nan=True)


def run_call(call: Call, wanted: list[str]) -> dict[str, Any]:
    """In a worker: differentiate with respect to each of the inputs."""
    from hyper_parallel import linear_cross_entropy

    adapter, data, size, rank = this_adapter(), data_of(call), this_world_size(), this_rank()
    hidden = data.hidden
    if call.sequence_dim is not None:
        hidden = reference.cut(hidden, size, call.sequence_dim)[rank]
    inputs = {
        "hidden": adapter.tensor(hidden, call.dtype),
        "weight": adapter.tensor(reference.cut(data.weight, size, 0)[rank], call.dtype),
    }
    if data.bias is not None:
        inputs["bias"] = adapter.tensor(reference.cut(data.bias, size, 0)[rank], call.dtype)
    target, options = adapter.tensor(data.target, "int64"), dict(call.options)
    if call.sequence_dim is not None:
        options |= {"sequence_parallel": True, "sequence_dim": call.sequence_dim}
    results = {}
    for name in wanted:

        def function(x: Any, name: str = name) -> Any:
            own = inputs | {name: x}
            return linear_cross_entropy(
                own["hidden"],
                own["weight"],
                target,
                mesh_of((size,), ("tp",))["tp"],
                bias=own.get("bias"),
                reduction=call.reduction,
                **options,
            )

        done = adapter.value_and_grad(function, inputs[name], data.upstream)
        results[name] = (done.value, done.grad, (done.value_dtype, done.grad_dtype))
    return results


OPTIONS: dict[str, Call] = {
    "plain": Call(),
    "bias and chunks": Call(bias=True, options={"chunk_size": 4, "num_classes": 11}),
    "softcap": Call(bias=True, options={"softcap": 2.0, "chunk_size": 7}),
    "smoothing and z-loss": Call(options={"label_smoothing": 0.2, "z_loss": 0.05, "chunk_size": 4}),
    "sum": Call(reduction="sum"),
    "none": Call(reduction="none", bias=True, options={"chunk_size": 4}),
    "sequence": Call(sequence_dim=1, options={"chunk_size": 4}),
    "first dim as sequence": Call(sequence_dim=0, reduction="none"),
}


@on_offers(FLOATS, "dtype", 1, 2, 4)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(platform: str, world_size: int, dtype: str, option: str) -> None:
    """Every option in every dtype."""
    check(platform, world_size, replace(OPTIONS[option], dtype=dtype))


@on_groups(1, 2, 4)
@pytest.mark.parametrize("tokens", [(), (6,), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("classes", [3, 8, 9])
def test_shapes(platform: str, world_size: int, tokens: tuple[int, ...], classes: int) -> None:
    """Uneven and empty shards, tokens in any number of dims."""
    check(platform, world_size, Call(tokens, classes, ignored=False))


@on_groups(1, 2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_what_is_asked_for(platform: str, world_size: int, reduction: str, wanted: str) -> None:
    """A frozen head costs neither memory for its gradient nor a product; its gradient is not kept at all."""
    call = Call(reduction=reduction, bias=True, options={"chunk_size": 4})
    for computed in run_distributed(computed_gradients, call, wanted, platform=platform, world_size=world_size):
        assert computed == [[wanted]]


def computed_gradients(call: Call, wanted: str) -> list[list[str]]:
    """In a worker: for each time that gradients are computed, those that are."""
    from hyper_parallel import get_platform

    chunks = importlib.import_module(f"hyper_parallel.platform.{get_platform().name}._linear_chunks")
    begun: list[Any] = []
    create = chunks.Gradients.__init__

    def counted(self: Any, *args: Any) -> None:
        create(self, *args)
        begun.append(self)

    with mock.patch.object(chunks.Gradients, "__init__", counted):
        run_call(call, [wanted])
    return [[name for name in ("hidden", "weight", "bias") if getattr(g, name) is not None] for g in begun]


@on_groups(1, 2)
def test_nothing_to_learn(platform: str, world_size: int) -> None:
    """No token, or all ignored: the mean is NaN, the gradient 0."""
    for loss, grad in run_distributed(nothing, platform=platform, world_size=world_size):
        assert np.isnan(loss) and np.array_equal(grad, np.zeros_like(grad))


def nothing() -> Any:
    """In a worker."""
    from hyper_parallel import linear_cross_entropy

    adapter, size = this_adapter(), this_world_size()
    target = adapter.tensor(np.full(3, -100), "int64")
    weight = adapter.tensor(reference.cut(np.ones((4, 2)), size, 0)[this_rank()], "float32")
    hidden = adapter.tensor(np.ones((3, 2)), "float32")
    group = mesh_of((size,), ("tp",))["tp"]
    done = adapter.value_and_grad(lambda w: linear_cross_entropy(hidden, w, target, group), weight)
    return done.value, done.grad


@pytest.mark.contract("E1")
@on_groups(2)
def test_bad_shapes(platform: str, world_size: int) -> None:
    """What does not fit is named."""
    messages = run_distributed(bad_shapes, platform=platform, world_size=world_size, expect_error=False)
    for message in messages:
        assert "the hidden states have shape (3, 2)" in message and "(4, 3)" in message


def bad_shapes() -> str:
    """In a worker."""
    from hyper_parallel import LossParallelLayoutError, linear_cross_entropy

    adapter = this_adapter()
    with pytest.raises(LossParallelLayoutError) as found:
        linear_cross_entropy(
            adapter.tensor(np.ones((3, 2)), "float32"),
            adapter.tensor(np.ones((4, 3)), "float32"),
            adapter.tensor(np.zeros(3), "int64"),
            mesh_of((2,), ("tp",))["tp"],
        )
    return str(found.value)
