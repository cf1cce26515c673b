"""Shapes of logits and target; class counts that do not divide; no tokens; nothing that counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.cases import REDUCTIONS, LossCase, expected_results, make_case
from tests.conformance.groups import on_groups
from tests.conformance.loss_calls import call_loss, check, check_results, context_of, mesh_of, placements_of, target_of
from tests.harness import run_distributed, this_rank

reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
entries = pytest.mark.parametrize("entry", ["function", "decomposed"])


@pytest.mark.contract("G1", "P2", "TRAP7", "TRAP12")
@on_groups()
@reductions
@entries
@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 7), (3, 7, 4), (2, 7, 3, 5), (2, 7, 2, 1, 3)], ids=str)
def test_shapes(platform: str, world_size: int, shape: tuple[int, ...], reduction: str, entry: str) -> None:
    """1-D logits, no token dim but N, and further dims, whose gradient keeps its order."""
    tokens = int(np.prod(shape)) // 7
    ignored = [1] if tokens > 1 else []
    check(platform, make_case(world_size, shape, reduction=reduction, weighted=True, ignored=ignored, entry=entry))


@pytest.mark.contract("G1", "P3", "TRAP3")
@on_groups()
@entries
@pytest.mark.parametrize("classes", [1, 2, 3, 4, 5, 6, 9, 13])
def test_class_counts(platform: str, world_size: int, classes: int, entry: str) -> None:
    """Uneven shards, and ranks without a class; all ranks take part and get the same loss."""
    case = make_case(world_size, (4, classes), ignored=[1], weighted=True, entry=entry)
    check(platform, case)
    check(platform, case.but(reduction="none", upstream=np.array([1.0, 2.0, 3.0, -1.0])))


@pytest.mark.contract("P3", "TRAP3")
@on_groups(2, 3, 4)
@pytest.mark.parametrize("shape", [(2,), (3, 2, 4), (0, 2)], ids=str)
def test_empty_shards_in_other_shapes(platform: str, world_size: int, shape: tuple[int, ...]) -> None:
    """A rank without a class, whatever the shape."""
    check(platform, make_case(world_size, shape, reduction="sum"))


@pytest.mark.contract("P3")
@on_groups(4)
def test_vocabulary_32003(platform: str, world_size: int) -> None:
    """32003 classes on 4 ranks."""
    check(platform, make_case(world_size, (3, 32003), weighted=True, ignored=[1]))


@pytest.mark.contract("P2", "TRAP7")
@on_groups()
@reductions
@entries
@pytest.mark.parametrize("shape", [(0, 7), (0, 7, 3), (3, 7, 0)], ids=str)
def test_no_tokens(platform: str, world_size: int, shape: tuple[int, ...], reduction: str, entry: str) -> None:
    """N = 0: sum is 0, mean NaN, as in PyTorch; backward gives an empty gradient."""
    for result in check(platform, make_case(world_size, shape, reduction=reduction, entry=entry)):
        if reduction == "mean":
            assert np.isnan(result["loss"])
        else:
            assert result["loss"].sum() == 0.0


@pytest.mark.contract("P2")
@on_groups()
@reductions
@entries
@pytest.mark.parametrize("weighted", [False, True])
def test_all_tokens_ignored(platform: str, world_size: int, reduction: str, entry: str, weighted: bool) -> None:
    """Mean is NaN and sum 0 as in PyTorch, the gradient 0, and the loss is attached to the graph."""
    case = make_case(world_size, (3, 7), reduction=reduction, weighted=weighted, ignored=[0, 1, 2], entry=entry)
    for result in check(platform, case):
        assert not result["grad"].any() and not np.isnan(result["grad"]).any()


@pytest.mark.contract("P2")
@on_groups()
@reductions
def test_flattened_by_the_user(platform: str, world_size: int, reduction: str) -> None:
    """Logits ``(B, S, V)``, flattened by the user before the loss, give the gradient in their own shape."""
    case = make_case(world_size, (6, 11), reduction=reduction, ignored=[2], weighted=True)
    results = run_distributed(flattened, case, (2, 3, 11), platform=platform, world_size=world_size)
    check_results(case, results)


def flattened(case: LossCase, shape: tuple[int, int, int]) -> dict[str, Any]:
    """``run_case`` with three-dimensional logits."""
    adapter = this_adapter()
    slices = (slice(None), slice(None), case.slices(this_rank())[1])
    local = adapter.tensor(case.logits.reshape(shape)[slices], case.dtype)
    before = adapter.numpy(local)
    mesh = mesh_of(case.mesh, case.mesh_names)
    found: dict[str, Any] = {}

    def loss_of(x: Any) -> Any:
        logits = adapter.wrap(case.entry, x, mesh, placements_of((2,)), shape)
        with context_of(case):
            flat = adapter.reshape(logits, (-1, shape[2]))
            weight = adapter.tensor(case.weight, case.dtype)
            loss = call_loss(case, flat, target_of(case), weight)
            found["kind"] = adapter.kind_of(loss)
            if case.effective_reduction != "none":
                found["float"] = adapter.host_number(loss)
            return adapter.unwrap(loss)

    done = adapter.value_and_grad(loss_of, local, case.upstream_of(this_rank()))
    return found | {
        "loss": done.value,
        "loss_dtype": done.value_dtype,
        "grad": done.grad.reshape(-1, done.grad.shape[-1]),
        "grad_dtype": done.grad_dtype,
        "unchanged": bool(np.array_equal(before, adapter.numpy(local))),
    }


@pytest.mark.contract("G1")
@on_groups(2, 3)
@entries
def test_strided_logits(platform: str, world_size: int, entry: str) -> None:
    """Logits that are views with other strides (class-major, every second element, expanded) give the same."""
    case = make_case(world_size, (6, 11), reduction="none", ignored=[2], weighted=True, entry=entry)
    found = run_distributed(strided, case, platform=platform, world_size=world_size)
    expected = expected_results(case)
    for layout in found[0]:
        for rank, result in enumerate(found):
            loss, grad = result[layout]
            np.testing.assert_allclose(loss, expected[rank][0], rtol=1e-5, atol=1e-6, err_msg=layout)
            np.testing.assert_allclose(grad, expected[rank][1], rtol=1e-5, atol=1e-6, err_msg=layout)


def strided(case: LossCase) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Loss and gradient for several memory layouts of the same local logits."""
    adapter = this_adapter()
    part = case.logits[case.slices(this_rank())]
    layouts = {
        "class-major": (part.T, lambda x: adapter.transpose(x), lambda g: g.T),
        "contiguous": (part, lambda x: x, lambda g: g),
        "padded": (np.pad(part, ((0, 0), (1, 2))), lambda x: adapter.narrow(x, 1, 1, part.shape[1]),
                   lambda g: g[:, 1 : 1 + part.shape[1]]),
    }  # fmt: skip
    found = {}
    for name, (array, view, back) in layouts.items():

        def loss_of(x: Any, view: Any = view) -> Any:
            logits = adapter.wrap(
                case.entry, view(x), mesh_of(case.mesh, case.mesh_names), placements_of(case.shards), case.logits.shape
            )
            with context_of(case):
                weight = adapter.tensor(case.weight, case.dtype)
                return adapter.unwrap(call_loss(case, logits, target_of(case), weight))

        done = adapter.value_and_grad(loss_of, adapter.tensor(array, case.dtype), case.upstream)
        found[name] = (done.value, back(done.grad))
    return found
