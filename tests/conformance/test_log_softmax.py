"""log_softmax on its own, whatever uses it, and the decomposed loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.groups import FLOATS, on_groups, on_offers
from tests.conformance.loss_calls import mesh_of, placements_of
from tests.conformance.oracle import assert_close, local_slices, reference, round_to
from tests.harness import run_distributed, this_rank


def run_log_softmax(
    logits: np.ndarray,
    upstream: np.ndarray,
    dim: int,
    mesh: tuple[int, ...],
    shards: tuple[int | None, ...],
    dtype: str,
    entry: str,
    inside: bool,
) -> dict[str, Any]:
    """In a worker: log-probabilities of this rank, and the gradient for an upstream gradient of any kind."""
    from contextlib import nullcontext

    from hyper_parallel.loss_parallel import loss_parallel

    adapter = this_adapter()
    own = local_slices(logits.shape, mesh, shards, this_rank())
    names = ("dp", "tp")[-len(mesh) :]
    local = adapter.tensor(logits[own], dtype)
    kind = []

    def function(x: Any) -> Any:
        full = adapter.wrap(entry, x, mesh_of(mesh, names), placements_of(shards), logits.shape)
        with loss_parallel() if inside else nullcontext():
            result = adapter.log_softmax(full, dim)
        kind.append(adapter.kind_of(result))
        return adapter.unwrap(result)

    done = adapter.value_and_grad(function, local, upstream[own])
    return {"value": done.value, "grad": done.grad, "dtypes": (done.value_dtype, done.grad_dtype), "kind": kind[0]}


def check_log_softmax(
    platform: str,
    logits: np.ndarray,
    upstream: np.ndarray,
    dim: int = 1,
    *,
    mesh: tuple[int, ...],
    shards: tuple[int | None, ...],
    dtype: str = "float32",
    entry: str = "ours",
    inside: bool = True,
) -> None:
    """Value and gradient of every rank are the oracle's."""
    logits, upstream = round_to(logits, dtype), round_to(upstream, dtype)
    arguments = (logits, upstream, dim, mesh, shards, dtype, entry, inside)
    found = run_distributed(run_log_softmax, *arguments, platform=platform, world_size=int(np.prod(mesh)))
    axis = dim % logits.ndim
    value = reference.log_softmax([logits], axis)[0]
    grad = reference.log_softmax_grad([logits], axis, [upstream])[0]
    spread = float(np.ptp(logits[np.isfinite(logits)])) if logits.size else 1.0
    total = float(np.abs(upstream).sum(axis).max(initial=1.0))
    for rank, result in enumerate(found):
        own = local_slices(logits.shape, mesh, shards, rank)
        assert_close(result["value"], value[own], dtype, f"log_softmax on rank {rank}", scale=max(1.0, spread))
        assert_close(result["grad"], grad[own], dtype, f"gradient on rank {rank}", scale=total)
        assert result["dtypes"] == (dtype, dtype)
        assert result["kind"] == entry


def _numbers(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape) * 3.0, rng.standard_normal(shape)


@pytest.mark.contract("K1", "TRAP1")
@on_offers(FLOATS, "dtype")
def test_any_upstream_gradient(platform: str, world_size: int, dtype: str) -> None:
    """G - softmax * (sum of g over all classes), for an upstream gradient that no NLL would send."""
    check_log_softmax(platform, *_numbers(5, 11), mesh=(world_size,), shards=(1,), dtype=dtype)


@pytest.mark.contract("K1", "TRAP1", "P2", "P3")
@on_groups()
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((7,), 0), ((2, 3), -1), ((2, 9, 3), 1), ((2, 3, 9), -1), ((0, 5), 1), ((2, 2, 3, 2), -3)],
    ids=str,
)
def test_shapes(platform: str, world_size: int, shape: tuple[int, ...], dim: int) -> None:
    """Any shape, the classes in any dim, empty shards."""
    check_log_softmax(platform, *_numbers(*shape), dim, mesh=(world_size,), shards=(dim % len(shape),))


@pytest.mark.contract("K1", "TRAP1")
@on_groups(2, 3)
def test_distillation(platform: str, world_size: int) -> None:
    """KL divergence to a teacher, whose gradient is softmax - teacher."""
    logits, _ = _numbers(4, 9)
    teacher = np.random.default_rng(1).dirichlet(np.ones(9), 4)
    check_log_softmax(platform, logits, -teacher, mesh=(world_size,), shards=(1,))


@pytest.mark.contract("K1", "TRAP1")
@on_offers({"torch": ("native",)}, "entry", 2)
def test_native_tensors(platform: str, world_size: int, entry: str) -> None:
    """The framework's own distributed tensors get the same gradient, and a result of their kind."""
    check_log_softmax(platform, *_numbers(4, 9), mesh=(2,), shards=(1,), entry=entry)
    check_log_softmax(platform, *_numbers(4, 9), dim=0, mesh=(2,), shards=(1,), entry=entry)


@pytest.mark.contract("TRAP6", "I1")
@on_groups(2, 3)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize(("shape", "dim"), [((4, 6), 0), ((3, 6, 5), 2), ((3, 6, 5), -3)], ids=str)
def test_dim_that_is_not_sharded(
    platform: str, world_size: int, inside: bool, shape: tuple[int, ...], dim: int
) -> None:
    """Over another dim it is the ordinary operator, in the context and out of it."""
    check_log_softmax(platform, *_numbers(*shape), dim, mesh=(world_size,), shards=(1,), inside=inside)


@pytest.mark.contract("K1", "P4")
@on_groups(4)
@pytest.mark.parametrize("shards", [(0, 1), (None, 1), (1, 0)], ids=str)
def test_two_mesh_dims(platform: str, world_size: int, shards: tuple[int | None, ...]) -> None:
    """Tokens or nothing on the other mesh dim."""
    check_log_softmax(platform, *_numbers(5, 9), mesh=(2, 2), shards=shards)


@pytest.mark.contract("K1")
@on_groups(1, 2, 3)
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_stable(platform: str, world_size: int, shift: float) -> None:
    """Large logits, and classes (a whole shard of them) at -inf."""
    logits, upstream = _numbers(4, 6)
    logits = logits + shift
    logits[0, 0] = logits[1, :3] = logits[2, 4:] = -np.inf
    check_log_softmax(platform, logits, upstream, mesh=(world_size,), shards=(1,))


@pytest.mark.contract("E1", "E3")
@on_groups(4)
def test_errors(platform: str, world_size: int) -> None:
    """Outside the context, or over a dim that two mesh dims shard: an error that names the layout."""
    numbers = _numbers(4, 8)
    for arguments in (
        (*numbers, 1, (4,), (1,), "float32", "ours", False),
        (*numbers, 1, (2, 2), (1, 1), "float32", "ours", True),
    ):
        raised = run_distributed(
            run_log_softmax, *arguments, platform=platform, world_size=world_size, expect_error=True
        )
        assert len(set(raised)) == 1
        assert raised[0].type in ("LossParallelLayoutError", "UnsupportedOperatorError")
        assert "S(1)@" in raised[0].message
