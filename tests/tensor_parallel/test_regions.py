"""The regions against NumPy: values, gradients, collectives, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness import run_distributed, this_rank, this_world_size
from tests.tensor_parallel.arrays import pieces, values

TORCH = pytest.mark.platform("torch")
WORLD_SIZES = (1, 2, 4)
SIZES = {1: (6,), 2: (4, 2), 4: (2, 0, 3, 1)}

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
    import torch

    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.torch_workers import array, tensor, tp_mesh

    mesh = tp_mesh()
    rank = this_rank()
    x = tensor(xs[rank].T, dtype).T.requires_grad_()  # not contiguous
    before = x.detach().clone()
    where = {
        "mesh": lambda: mesh["tp"],
        "group": lambda: mesh.get_group(),
        "native group": lambda: torch.distributed.group.WORLD,
        "native mesh": lambda: torch.distributed.init_device_mesh("cpu", (this_world_size(),)),
    }[group]()
    y = getattr(regions, name)(x, where, **options)
    y.backward(tensor(gs[rank].T, dtype).T)
    unchanged = torch.equal(x.detach(), before)
    return array(y), array(x.grad), unchanged


def check(
    name: str, world_size: int, dim: int, sizes: Any, *, dtype: str = "float64", group: str = "mesh"
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
    found = run_distributed(run_region, name, xs, gs, options, dtype, group, world_size=world_size)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05}[dtype]
    for rank, (y, grad, unchanged) in enumerate(found):
        np.testing.assert_allclose(y, ys[rank], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(grad, grads[rank], rtol=tolerance, atol=tolerance)
        assert unchanged


def _cases() -> list[Any]:
    marks = {name: [pytest.mark.contract(id)] for name, id in CONTRACT.items()}
    return [pytest.param(name, marks=marks.get(name, [])) for name in REGIONS]


@TORCH
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", _cases())
def test_values_and_gradients(name: str, world_size: int) -> None:
    for dim in (0, 1, -1):
        check(name, world_size, dim, None)
    check(name, world_size, 1, SIZES[world_size])
    check(name, world_size, 1, None, dtype="float32")
    check(name, world_size, 1, None, dtype="bfloat16")


@TORCH
@pytest.mark.parametrize("group", ("group", "native group", "native mesh"))
def test_kinds_of_groups(group: str) -> None:
    check("copy_to_tp_region", 2, 1, None, group=group)
    check("gather_from_tp_region", 2, 1, None, group=group)


def second_derivatives(name: str) -> tuple[np.ndarray, np.ndarray]:
    """y = f(x^2), s = sum(w y): the gradient is 2 x f*(w), whose sum has the gradient 2 f*(w)."""
    import torch

    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.torch_workers import array, tensor, tp_mesh

    x = tensor(values(4, 4, seed=this_rank()), grad=True)
    options = {} if "copy" in name or "reduce_from" in name else {"dim": 1}
    y = getattr(regions, name)(x.square(), tp_mesh(), **options)
    w = tensor(values(*y.shape, seed=9 + this_rank()))
    (grad,) = torch.autograd.grad((w * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    return array(grad / x), array(second)


@TORCH
@pytest.mark.parametrize("name", REGIONS)
def test_second_derivatives(name: str) -> None:
    for first, second in run_distributed(second_derivatives, name, world_size=2):
        np.testing.assert_allclose(second, first, rtol=1e-12)


def collectives_of(name: str) -> tuple[dict[str, int], dict[str, int]]:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.torch_workers import count_collectives, tensor, tp_mesh

    x = tensor(values(4, 4), grad=True)
    options = {} if "copy" in name or "reduce_from" in name else {"dim": 1}
    mesh = tp_mesh()
    with count_collectives() as forward:
        y = getattr(regions, name)(x, mesh, **options)
    with count_collectives() as backward:
        y.sum().backward()
    return forward, backward


@TORCH
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
def test_collectives(name: str, forward: dict[str, int], backward: dict[str, int]) -> None:
    assert run_distributed(collectives_of, name, world_size=2) == [(forward, backward)] * 2
    assert run_distributed(collectives_of, name, world_size=1) == [({}, {})]


def identity_alone(name: str) -> bool:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.torch_workers import tensor, tp_mesh

    x = tensor(values(2, 2))
    return getattr(regions, name)(x, tp_mesh()) is x


@TORCH
@pytest.mark.parametrize("name", REGIONS)
def test_a_group_of_one(name: str) -> None:
    assert run_distributed(identity_alone, name, world_size=1) == [True]


def misuse(case: str) -> None:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.torch_workers import tensor, tp_mesh

    x = tensor(values(4, 4))
    mesh = tp_mesh()
    {
        "dim": lambda: regions.gather_from_tp_region(x, mesh, 2),
        "sizes": lambda: regions.scatter_to_tp_region(x, mesh, 0, size=(3, 2)),
        "count": lambda: regions.scatter_to_tp_region(x, mesh, 0, size=(1, 1, 2)),
        "own": lambda: regions.gather_from_tp_region(x, mesh, 0, size=12),
        "none": lambda: regions.copy_to_tp_region(x, None),
        "type": lambda: regions.copy_to_tp_region(x, "tp"),
    }[case]()


@TORCH
@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("dim", "IndexError", "along dim 2 of a tensor of shape (4, 4)"),
        ("sizes", "ValueError", "dim 0 of shape (4, 4) cannot be cut into size=(3, 2)"),
        ("count", "ValueError", "size=(1, 1, 2) does not give each of 2 ranks its piece"),
        ("own", "ValueError", "size=12 gives it 6 of (6, 6)"),
        ("none", "TypeError", "mesh['tp']"),
        ("type", "TypeError", "found str"),
    ],
)
def test_misuse(case: str, kind: str, text: str) -> None:
    for error in run_distributed(misuse, case, world_size=2, expect_error=True):
        assert error.type == kind and text in error.message


def classes_agree() -> bool:
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.torch_workers import tensor, tp_mesh

    x, mesh = tensor(values(2, 4)), tp_mesh()
    pairs = [
        (regions.CopyToTPRegion.apply(x, mesh), regions.copy_to_tp_region(x, mesh)),
        (regions.ReduceFromTPRegion.apply(x, mesh), regions.reduce_from_tp_region(x, mesh)),
        (regions.GatherFromTPRegion.apply(x, mesh, 1), regions.gather_from_tp_region(x, mesh, 1)),
        (regions.ScatterToTPRegion.apply(x, mesh, 1), regions.scatter_to_tp_region(x, mesh, 1)),
    ]
    return all(a.equal(b) for a, b in pairs)


@TORCH
def test_classes() -> None:
    assert run_distributed(classes_agree, world_size=2) == [True, True]
