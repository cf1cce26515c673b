"""The regions against NumPy: values, gradients, collectives, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.arrays import pieces, values

SIZES = {1: (6,), 2: (4, 2), 4: (2, 0, 3, 1)}
PLATFORMS = ("torch", "mindspore")


def total(xs: list[np.ndarray]) -> list[np.ndarray]:
    return [sum(xs, np.zeros_like(xs[0]))] * len(xs)


def joined(xs: list[np.ndarray], dim: int) -> list[np.ndarray]:
    return [np.concatenate(xs, dim)] * len(xs)


def own(xs: list[np.ndarray], dim: int, sizes: Any) -> list[np.ndarray]:
    return [pieces(x, dim, len(xs), sizes)[r] for r, x in enumerate(xs)]


# region -> (forward, backward) of lists with one entry for each rank
REGIONS = {
    "copy_to_tp_region": (lambda x, d, s: x, lambda g, d, s: total(g)),
    "reduce_from_tp_region": (lambda x, d, s: total(x), lambda g, d, s: g),
    "gather_from_tp_region": (lambda x, d, s: joined(x, d), own),
    "scatter_to_tp_region": (own, lambda g, d, s: joined(g, d)),
    "gather_from_sequence_region": (lambda x, d, s: joined(x, d), lambda g, d, s: own(total(g), d, s)),
    "reduce_scatter_to_sequence_region": (lambda x, d, s: own(total(x), d, s), lambda g, d, s: joined(g, d)),
}
TAKES_WHOLE = {"scatter_to_tp_region", "reduce_scatter_to_sequence_region"}
CONTRACT = {
    "copy_to_tp_region": "R1",
    "reduce_from_tp_region": "R2",
    "gather_from_tp_region": "R3",
    "scatter_to_tp_region": "R4",
}


def run_region(
    name: str, xs: list[np.ndarray], gs: list[np.ndarray], options: dict[str, Any], dtype: str, group: str
) -> tuple[np.ndarray, np.ndarray, bool]:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.adapters import this_adapter

    adapter, rank = this_adapter(), this_rank()
    where: Any = {"mesh": lambda: adapter.mesh["tp"], "group": adapter.mesh.get_group}.get(group)
    where = where() if where else adapter.native_group(group)
    x = adapter.turned(xs[rank], dtype)
    before = adapter.array(x)
    found = adapter.differentiate(
        lambda x: getattr(regions, name)(x, where, **options), [x], upstream=gs[rank]
    )
    return found.value, found.inputs[0], np.array_equal(adapter.array(x), before)


def check(
    name: str, platform: str, world_size: int, dim: int, sizes: Any, *, dtype: str = "float64", group: str = "mesh"
) -> None:
    shape = [3, 6, 5]
    whole_in = name in TAKES_WHOLE or "copy" in name or "reduce_from" in name
    full = [values(*shape, seed=r) for r in range(world_size)]
    cut = [pieces(values(*shape, seed=r), dim, world_size, sizes)[r] for r in range(world_size)]
    xs = full if whole_in else cut
    forward, backward = REGIONS[name]
    ys = forward(xs, dim, sizes)
    gs = [values(*y.shape, seed=100 + r) for r, y in enumerate(ys)]
    grads = backward(gs, dim, sizes)
    options: dict[str, Any] = {} if "copy" in name or "reduce_from" in name else {"dim": dim}
    if options and (sizes is not None or not whole_in):
        options["size"] = shape[dim] if sizes is None else sizes
    found = run_distributed(
        run_region, name, xs, gs, options, dtype, group, platform=platform, world_size=world_size
    )
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05}[dtype]
    for rank, (y, grad, unchanged) in enumerate(found):
        np.testing.assert_allclose(y, ys[rank], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(grad, grads[rank], rtol=tolerance, atol=tolerance)
        assert unchanged


def _cases() -> list[Any]:
    marks = {name: [pytest.mark.contract(id)] for name, id in CONTRACT.items()}
    return [pytest.param(name, marks=marks.get(name, [])) for name in REGIONS]


@on_groups(1, 2, 4)
@pytest.mark.parametrize("name", _cases())
def test_values_and_gradients(name: str, platform: str, world_size: int) -> None:
    """Of inputs that are not contiguous, which Megatron-LM once gave back unreduced (#5337)."""
    for dim in (0, 1, -1):
        check(name, platform, world_size, dim, None)
    check(name, platform, world_size, 1, SIZES[world_size])
    check(name, platform, world_size, 1, None, dtype="float32")
    check(name, platform, world_size, 1, None, dtype="bfloat16")


@pytest.mark.parametrize(
    ("platform", "group"),
    [("torch", "group"), ("torch", "native group"), ("torch", "native mesh"),
     ("mindspore", "group"), ("mindspore", "native group")],
)  # fmt: skip
def test_kinds_of_groups(platform: str, group: str) -> None:
    check("copy_to_tp_region", platform, 2, 1, None, group=group)
    check("gather_from_tp_region", platform, 2, 1, None, group=group)


def second_derivatives(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y = f(x^2), s = sum(w y): the gradient is 2 x f*(w), whose sum has the gradient 2 f*(w)."""
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    array = values(4, 4, seed=this_rank())
    options = {} if "copy" in name or "reduce_from" in name else {"dim": 1}
    first, second = adapter.twice(
        lambda x: getattr(regions, name)(x, adapter.mesh, **options),
        adapter.tensor(array),
        lambda y: adapter.tensor(values(*y.shape, seed=9 + this_rank())),
    )
    return array, first, second


@on_groups(2)
@pytest.mark.parametrize("name", REGIONS)
def test_second_derivatives(name: str, platform: str, world_size: int) -> None:
    for x, first, second in run_distributed(second_derivatives, name, platform=platform, world_size=world_size):
        np.testing.assert_allclose(second, first / x, rtol=1e-12)


def collectives_of(name: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Of a region that is told no size, and of one that is."""
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    size = 4 * adapter.mesh.size() if "gather_from" in name else 4
    options = {} if "copy" in name or "reduce_from" in name else {"dim": 1}
    counts = []
    for told in ({}, {"size": size} if options else {}):
        found = adapter.differentiate(
            lambda x, told=told: getattr(regions, name)(x, adapter.mesh, **options, **told),
            [adapter.tensor(values(4, 4))],
        )
        counts.append((found.forward, found.backward))
    return counts


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("copy_to_tp_region", {}, {"all_reduce": 1}),
        ("reduce_from_tp_region", {"all_reduce": 1}, {}),
        ("gather_from_tp_region", {"all_gather": 1}, {}),
        ("scatter_to_tp_region", {}, {"all_gather": 1}),
        ("gather_from_sequence_region", {"all_gather": 1}, {"reduce_scatter": 1}),
        ("reduce_scatter_to_sequence_region", {"reduce_scatter": 1}, {"all_gather": 1}),
    ],
)
def test_collectives(platform: str, name: str, forward: dict[str, int], backward: dict[str, int]) -> None:
    """Where a region relies on what other ranks hold, they make sure of it first (on CPU), told a size or not."""
    if "gather_from" in name or "reduce" in name:
        forward = forward | {"all_gather": forward.get("all_gather", 0) + 1}
    assert run_distributed(collectives_of, name, platform=platform, world_size=2) == [[(forward, backward)] * 2] * 2
    assert run_distributed(collectives_of, name, platform=platform, world_size=1) == [[({}, {})] * 2]


def identity_alone(name: str) -> bool:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.adapters import this_adapter

    x = this_adapter().tensor(values(2, 2))
    return getattr(regions, name)(x, this_adapter().mesh) is x


@on_groups(1)
@pytest.mark.parametrize("name", REGIONS)
def test_a_group_of_one(name: str, platform: str, world_size: int) -> None:
    assert run_distributed(identity_alone, name, platform=platform, world_size=world_size) == [True]


def misuse(case: str) -> None:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.adapters import this_adapter

    x, mesh = this_adapter().tensor(values(4, 4)), this_adapter().mesh
    {
        "dim": lambda: regions.gather_from_tp_region(x, mesh, 2),
        "sizes": lambda: regions.scatter_to_tp_region(x, mesh, 0, size=(3, 2)),
        "count": lambda: regions.scatter_to_tp_region(x, mesh, 0, size=(1, 1, 2)),
        "own": lambda: regions.gather_from_tp_region(x, mesh, 0, size=12),
        "none": lambda: regions.copy_to_tp_region(x, None),
        "type": lambda: regions.copy_to_tp_region(x, 7),
        "term": lambda: regions.reduce_from_tp_region(this_adapter().tensor(values(2, 4 - this_rank())), mesh),
    }[case]()


@on_groups(2)
@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("dim", "IndexError", "along dim 2 of a tensor of shape (4, 4)"),
        ("sizes", "ValueError", "dim 0 of shape (4, 4) cannot be cut into size=(3, 2)"),
        ("count", "ValueError", "size=(1, 1, 2) does not give each of 2 ranks its piece"),
        ("own", "ValueError", "sharded as 4 on rank 0, 4 on rank 1; expected (6, 6), the pieces of 12"),
        ("none", "TypeError", "mesh['tp']"),
        ("type", "TypeError", "found int"),
        ("term", "ValueError", "different tensors: float64 (2, 4) on rank 0, float64 (2, 3) on rank 1"),
    ],
)
def test_misuse(case: str, kind: str, text: str, platform: str, world_size: int) -> None:
    for error in run_distributed(misuse, case, platform=platform, world_size=world_size, expect_error=True):
        assert error.type == kind and text in error.message


def classes_agree() -> bool:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    x, mesh = adapter.tensor(values(2, 4)), adapter.mesh
    pairs = [
        (regions.CopyToTPRegion.apply(x, mesh), regions.copy_to_tp_region(x, mesh)),
        (regions.ReduceFromTPRegion.apply(x, mesh), regions.reduce_from_tp_region(x, mesh)),
        (regions.GatherFromTPRegion.apply(x, mesh, 1), regions.gather_from_tp_region(x, mesh, 1)),
        (regions.ScatterToTPRegion.apply(x, mesh, 1), regions.scatter_to_tp_region(x, mesh, 1)),
    ]
    return all(np.array_equal(adapter.array(a), adapter.array(b)) for a, b in pairs)


@on_groups(2)
def test_classes(platform: str, world_size: int) -> None:
    assert run_distributed(classes_agree, platform=platform, world_size=world_size) == [True, True]
