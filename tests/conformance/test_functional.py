"""The loss called by name: every option, dtype, shape and number of ranks against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

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
    """One call: the whole logits' shape, dtype and options; ``upstream`` weights of loss, log-probability, entropy."""

    shape: tuple[int, ...] = (6, 11)
    dtype: str = "float32"
    reduction: str = "mean"
    weighted: bool = False
    ignored: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    more: bool = False
    known: bool = True
    group: str = "mesh"
    shift: float = 0.0


@dataclass(frozen=True)
class Data:
    """What a call is made with; equal on all ranks."""

    logits: np.ndarray
    target: np.ndarray
    weight: np.ndarray | None
    upstream: tuple[np.ndarray, np.ndarray, np.ndarray]


def data_of(call: Call) -> Data:
    rng = np.random.default_rng(3)
    target = rng.integers(0, call.shape[-1], call.shape[:-1])
    if call.ignored and target.size > 1:
        target.reshape(-1)[1] = -100
    tokens = call.shape[:-1]
    return Data(
        round_to(rng.standard_normal(call.shape) * 3 + call.shift, call.dtype),
        target,
        round_to(rng.uniform(0.25, 2.0, call.shape[-1]), call.dtype) if call.weighted else None,
        (
            rng.standard_normal(tokens if call.reduction == "none" else ()),
            rng.standard_normal(tokens),
            rng.standard_normal(tokens),
        ),
    )


def expected(call: Call, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Loss, log-probabilities, entropy, and the gradient of each shard."""
    data = data_of(call)
    axis = len(call.shape) - 1
    shards = reference.cut(data.logits, parts, axis)
    formula = {k: v for k, v in call.options.items() if k in ("label_smoothing", "z_loss")}
    tokens = reference.cross_entropy(shards, axis, data.target, weight=data.weight, **formula)
    loss, _ = reference.reduce_tokens([tokens], call.reduction)
    loss = loss[0] if call.reduction == "none" else loss
    with np.errstate(divide="ignore"):
        scale: Any = 1.0 / tokens.token_weight.sum() if call.reduction == "mean" else 1.0
    grads = tokens.backward(data.upstream[0] * scale)
    plain = reference.cross_entropy(shards, axis, data.target)
    entropy = np.where(plain.kept, reference.entropy(shards, axis), 0.0)
    if call.more:
        of_log_prob = plain.backward(-data.upstream[1])
        of_entropy = reference.entropy_grad(shards, axis, np.where(plain.kept, data.upstream[2], 0.0))
        grads = [a + b + c for a, b, c in zip(grads, of_log_prob, of_entropy)]
    return np.asarray(loss), -plain.loss, entropy, grads


def check(platform: str, world_size: int, call: Call) -> None:
    found = run_distributed(run_call, call, platform=platform, world_size=world_size, timeout=60)
    loss, log_prob, entropy, grads = expected(call, world_size)
    statistics = "float64" if call.dtype == "float64" else "float32"
    tokens = int(np.prod(call.shape[:-1]))
    size = 20.0 * (max(tokens, 1) if call.reduction == "sum" else 1)
    for rank, result in enumerate(found):
        assert_close(result["loss"], loss, statistics, "loss", scale=size)
        assert_close(result["grad"], grads[rank], call.dtype, f"gradient of rank {rank}", scale=20.0)
        assert result["dtypes"] == (statistics, call.dtype)
        assert np.array_equal(result["loss"], found[0]["loss"], equal_nan=True)
        if call.more:
            assert_close(result["log_prob"], log_prob, statistics, "log-probabilities", scale=20.0)
            assert_close(result["entropy"], entropy, statistics, "entropy", scale=20.0)


def run_call(call: Call) -> dict[str, Any]:
    """In a worker."""
    from hyper_parallel import get_platform, vocab_parallel_cross_entropy

    adapter, platform, data = this_adapter(), get_platform(), data_of(call)
    size, rank = this_world_size(), this_rank()
    mesh = mesh_of((size,), ("tp",))
    group = {"mesh": mesh["tp"], "group": mesh.get_group("tp"), "none": None}[call.group]
    local = adapter.tensor(reference.cut(data.logits, size, len(call.shape) - 1)[rank], call.dtype)
    target = adapter.tensor(data.target, "int64")
    options = dict(call.options)
    if data.weight is not None:
        options["weight"] = adapter.tensor(data.weight, call.dtype)
    if call.known:
        options["num_classes"] = call.shape[-1]
    result: dict[str, Any] = {}

    def function(x: Any) -> Any:
        if options.get("inplace"):
            x = x * 1.0
        out = vocab_parallel_cross_entropy(
            x,
            target,
            group,
            reduction=call.reduction,
            return_log_probs=call.more,
            return_entropy=call.more,
            **options,
        )
        if not call.more:
            out = (out,)
        names = ("loss", "log_prob", "entropy")
        result.update({name: adapter.numpy(value) for name, value in zip(names, out)})
        result["dtypes"] = adapter.dtype(out[0])
        total = None
        for value, upstream in zip(out, data.upstream):
            term = platform.sum_tokens(value * adapter.tensor(upstream, adapter.dtype(value)))
            total = term if total is None else total + term
        return total

    done = adapter.value_and_grad(function, local)
    return result | {"grad": done.grad, "dtypes": (result["dtypes"], done.grad_dtype)}


OPTIONS: dict[str, Call] = {
    "plain": Call(),
    "weights": Call(weighted=True),
    "smoothing": Call(options={"label_smoothing": 0.2}),
    "smoothing and weights": Call(weighted=True, options={"label_smoothing": 0.3}),
    "z-loss": Call(options={"z_loss": 0.1}),
    "everything": Call(weighted=True, options={"label_smoothing": 0.1, "z_loss": 0.05}),
    "in place": Call(weighted=True, options={"label_smoothing": 0.1, "inplace": True}),
    "validated": Call(options={"validate": True}),
    "classes not said": Call(known=False),
    "a Group": Call(group="group"),
}


@on_offers(FLOATS, "dtype", 1, 2, 4)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(platform: str, world_size: int, dtype: str, option: str) -> None:
    """Every option, with log-probabilities and entropy beside the loss."""
    call = replace(OPTIONS[option], dtype=dtype)
    check(platform, world_size, call)
    check(platform, world_size, replace(call, more=True, reduction="none"))


@on_groups(1, 2, 4)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(7,), (5, 12), (2, 3, 9), (4, 3), (3, 1), (0, 8)], ids=str)
def test_shapes(platform: str, world_size: int, reduction: str, shape: tuple[int, ...]) -> None:
    """Tokens in any number of dims, uneven and empty shards, no tokens."""
    check(platform, world_size, Call(shape, reduction=reduction, ignored=False))
    if 0 not in shape:
        check(platform, world_size, Call(shape, reduction=reduction, more=True, known=False))


@on_groups(1, 2)
def test_shifted_logits(platform: str, world_size: int) -> None:
    """A large number added to all logits takes nothing from the entropy's precision."""
    check(platform, world_size, Call((6, 11), shift=4096.0, more=True))


@on_groups(2)
def test_classes_of_minus_infinity(platform: str, world_size: int) -> None:
    """Classes of probability 0 add nothing to the entropy, and its gradient there is 0."""
    for result in run_distributed(masked_classes, platform=platform, world_size=world_size):
        assert np.isfinite(result["entropy"]).all() and np.isfinite(result["grad"]).all()
        np.testing.assert_allclose(result["entropy"], result["wanted"], rtol=1e-5)


def masked_classes() -> dict[str, Any]:
    """In a worker: whole shards of minus infinity, for one token each."""
    from hyper_parallel import get_platform, vocab_parallel_cross_entropy

    adapter, rank = this_adapter(), this_rank()
    logits = np.random.default_rng(0).standard_normal((3, 8))
    logits[0, :4] = logits[1, 4:] = logits[2, 2] = -np.inf
    target, seen = adapter.tensor(np.array([5, 1, 0]), "int64"), []

    def function(x: Any) -> Any:
        loss, entropy = vocab_parallel_cross_entropy(
            x, target, mesh_of((2,), ("tp",))["tp"], num_classes=8, return_entropy=True
        )
        seen.append(adapter.numpy(entropy))
        return get_platform().sum_tokens(entropy) + loss

    done = adapter.value_and_grad(function, adapter.tensor(reference.cut(logits, 2, 1)[rank], "float32"))
    return {"entropy": seen[0], "wanted": reference.entropy([logits], 1), "grad": done.grad}


@pytest.mark.contract("TRAP4")
@on_groups(1, 2)
def test_bad_target(platform: str, world_size: int) -> None:
    """Validating, the same IndexError everywhere; else NaN for the token, in all results."""
    for kind, message in run_distributed(
        bad_target, True, platform=platform, world_size=world_size, expect_error=True
    ):
        assert kind == "IndexError" and "Target 11 is out of bounds for 11 classes" in message
    for loss, log_prob in run_distributed(bad_target, False, platform=platform, world_size=world_size):
        assert np.isnan(loss).tolist() == np.isnan(log_prob).tolist() == [False, True, False]


def bad_target(validate: bool) -> Any:
    """In a worker."""
    from hyper_parallel import vocab_parallel_cross_entropy

    adapter, size = this_adapter(), this_world_size()
    logits = reference.cut(np.zeros((3, 11)), size, 1)[this_rank()]
    loss, log_prob = vocab_parallel_cross_entropy(
        adapter.tensor(logits, "float32"),
        adapter.tensor(np.array([0, 11, 10]), "int64"),
        mesh_of((size,), ("tp",))["tp"],
        reduction="none",
        validate=validate,
        return_log_probs=True,
    )
    return adapter.numpy(loss), adapter.numpy(log_prob)


@pytest.mark.contract("E1")
@on_groups(2, 4)
def test_classes_cut_in_another_way(platform: str, world_size: int) -> None:
    """Shards that are no torch.chunk pieces: the same error on all ranks, which names both."""
    messages = run_distributed(cut_otherwise, platform=platform, world_size=world_size, expect_error=True)
    widths = tuple(range(1, world_size + 1))
    for kind, message in messages:
        assert kind == "LossParallelLayoutError" and f"hold {widths} of {sum(widths)} classes" in message


def cut_otherwise() -> None:
    """In a worker."""
    from hyper_parallel import vocab_parallel_cross_entropy

    adapter = this_adapter()
    local = adapter.tensor(np.zeros((2, this_rank() + 1)), "float32")
    group = mesh_of((this_world_size(),), ("tp",))["tp"]
    vocab_parallel_cross_entropy(local, adapter.tensor(np.zeros(2), "int64"), group)


@on_groups(1)
def test_without_a_group(platform: str, world_size: int) -> None:
    """``None``: one device."""
    check(platform, world_size, Call(group="none", more=True))
    check(platform, world_size, Call(group="none", known=False, weighted=True))


@pytest.mark.contract("G2")
@on_groups(2, 4)
def test_what_is_sent(platform: str, world_size: int) -> None:
    """8 bytes a token; with the entropy 16; in blocks where collectives can be asynchronous; nothing backward.

    On CPU a header before it, but with ``validate=False``.
    """
    for sent in run_distributed(bytes_sent, platform=platform, world_size=world_size):
        blocks, header = sent.pop("blocks"), ("all_gather", 24)
        assert blocks == ([("all_gather", 16)] * 3 if platform == "torch" else [("all_gather", 48)])
        assert sent == {
            "plain": [("all_gather", 48)],
            "entropy": [("all_gather", 96)],
            "validated": [header, ("all_gather", 48)],
        }


def bytes_sent() -> dict[str, Any]:
    """In a worker."""
    from hyper_parallel import vocab_parallel_cross_entropy

    adapter, size, data = this_adapter(), this_world_size(), data_of(Call())
    local = reference.cut(data.logits, size, 1)[this_rank()]
    target, group = adapter.tensor(data.target, "int64"), mesh_of((size,), ("tp",))["tp"]
    seen = {}
    for name in ("plain", "entropy", "blocks", "validated"):
        blocks, validate = 3 if name == "blocks" else 1, None if name == "validated" else False
        with adapter.record_collectives() as sent:

            def function(
                x: Any, wanted: bool = name == "entropy", blocks: int = blocks, validate: Any = validate
            ) -> Any:
                out = vocab_parallel_cross_entropy(
                    x,
                    target,
                    group,
                    num_classes=11,
                    return_entropy=wanted,
                    overlap_blocks=blocks,
                    validate=validate,
                )
                return out[0] if wanted else out

            adapter.value_and_grad(function, adapter.tensor(local, "float32"))
        seen[name] = [(c.name, c.bytes) for c in sent]
    return seen
