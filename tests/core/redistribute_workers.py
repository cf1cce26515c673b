"""What the workers run for test_redistribute."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.redistribute import redistribution_steps
from tests.core.op_checks import as_dtensor, check_replicas, close, compare_gradient, mesh_of
from tests.core.raising import raises

MOST_PAIRS = 60


def every_pair(mesh_shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> None:
    """From any placements to any: values, gradients."""
    for shape in shapes:
        _every_pair(mesh_of(mesh_shape), shape)


def _every_pair(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    single: list[Placement] = [*(Shard(d) for d in range(x.dim())), Replicate(), Partial()]
    pairs = list(itertools.product(itertools.product(single, repeat=mesh.ndim), repeat=2))
    if len(pairs) > MOST_PAIRS:
        pairs = random.Random(0).sample(pairs, MOST_PAIRS)
    for source, target in pairs:
        _check_pair(x, weight, mesh, source, target)


def _check_pair(
    x: torch.Tensor,
    weight: torch.Tensor,
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> None:
    where = f"{tuple(x.shape)}: {_text(source)} -> {_text(target)} on {mesh.describe()}"
    leaf = as_dtensor(x, mesh, source)
    moved = leaf.redistribute(mesh, target)
    assert moved.placements == tuple(target), where
    assert moved.to_local().shape == moved.global_layout.local_shape, where
    check_replicas(moved, where)
    close(moved.full_tensor(), x, where)
    (moved.full_tensor() * weight).sum().backward()
    compare_gradient(leaf, weight, where)
    if not any(p.is_partial() for p in target):  # the local part is the plain one
        close(moved.to_local(), distribute_tensor(x, mesh, target).to_local(), f"{where}: local")


def _text(placements: Sequence[Placement]) -> str:
    return "".join(str(p) for p in placements)


def second_derivatives(mesh_shape: tuple[int, ...]) -> None:
    """The gradient of a gradient goes back through the collectives as well."""
    mesh = mesh_of(mesh_shape)
    x = torch.randn((5, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = torch.randn((5, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    single: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial()]
    for source, target in itertools.product(single, repeat=2):
        leaf = as_dtensor(x, mesh, [source] * mesh.ndim)
        moved = leaf.redistribute(placements=[target] * mesh.ndim).full_tensor()
        (first,) = torch.autograd.grad((moved**3).sum(), leaf, create_graph=True)
        close(first.full_tensor(), 3 * x**2, f"{source} -> {target}")
        (second,) = torch.autograd.grad((first.full_tensor() * v).sum(), leaf)
        close(second.full_tensor(), 6 * x * v, f"{source} -> {target}: second derivative")


def extrema(mesh_shape: tuple[int, ...]) -> None:
    """Partial("max") and ("min"): values, and an error instead of a wrong gradient."""
    mesh = mesh_of(mesh_shape)
    rank = mesh.get_local_rank(0)
    local = torch.arange(6.0).reshape(2, 3) * (-1) ** rank + rank
    every = torch.stack([torch.arange(6.0).reshape(2, 3) * (-1) ** r + r for r in range(mesh.size())])
    for op, expected in (("max", every.amax(0)), ("min", every.amin(0))):
        d = DTensor.from_local(local, mesh, [Partial(op)])
        close(d.full_tensor(), expected, op)
        close(d.redistribute(placements=[Shard(0)]).full_tensor(), expected, op)
        close(d.redistribute(placements=[Partial()]).full_tensor(), expected, op)
        whole = d.redistribute(placements=[Replicate()])
        close(whole.redistribute(placements=[Partial(op)]).full_tensor(), expected, op)
        d.requires_grad_()
        raises(ValueError, "has no gradient", d.full_tensor)
    shard = DTensor.from_local(local, mesh, [Shard(0)])
    if mesh.size() > 1:
        raises(ValueError, "redistribute to Replicate first", lambda: shard.redistribute(placements=[Partial("max")]))


def errors() -> None:
    """Another mesh, a wrong number of placements, a dim that is not there."""
    mesh, other = mesh_of((2, 2)), mesh_of((4,))
    d = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0), Replicate()])
    raises(ValueError, "another mesh", lambda: d.redistribute(other, [Shard(0)]))
    raises(ValueError, "expected one for each of its 2 dims", lambda: d.redistribute(placements=[Shard(0)]))
    raises(IndexError, "S(2) shards a dim", lambda: d.redistribute(placements=[Shard(2), Replicate()]))
    raises(ValueError, "needs placements", d.redistribute)
    assert redistribution_steps(d.placements, d.placements) == []

