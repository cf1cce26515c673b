"""In the workers: an operator on DTensors of every combination of placements against the same on plain tensors.

A combination either gives the single-device result and the single-device gradients, or raises
UnsupportedOperatorError on every rank.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform import get_platform

MOST_COMBINATIONS = {(2,): 30, (2, 2): 20}  # of every case on a mesh; else:
FEWER = 10


@dataclass(frozen=True)
class Case:
    """One operator call.

    Attributes:
        function: of the tensors; gives a tensor or several.
        inputs: ``"f5,3"`` floats of that shape, ``"p5,3"`` positive floats, ``"i5,3<7"`` integers below 7, ``"b5,3"``,
            ``"t7,1"``: True for the first two rows.
        must: combinations that must not be refused on two ranks, such as ``"S0 R"`` (``T`` is a plain tensor).
        never: combinations that must be refused on a 1-D mesh of more than one rank.
        gradients: whether to compare them.
    """

    function: Callable[..., Any]
    inputs: str
    must: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    gradients: bool = True


def parse(code: str) -> Placement | None:
    """``S0`` ``R`` ``P`` ``T``."""
    if code == "T":
        return None
    return Shard(int(code[1:])) if code[0] == "S" else Partial() if code == "P" else Replicate()


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def make_input(spec: str, generator: torch.Generator) -> torch.Tensor:
    kind, dims = spec[0], spec[1:].split("<")
    shape = [int(s) for s in dims[0].split(",") if s]
    if kind == "t":
        return (torch.arange(shape[0]) < 2).reshape(-1, *[1] * (len(shape) - 1)).expand(shape).clone()
    if kind == "b":
        return torch.rand(shape, generator=generator) < 0.5
    if kind == "i":
        return torch.randint(0, int(dims[1]), shape, generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.abs() + 0.5 if kind == "p" else x


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def codes_for(x: torch.Tensor) -> list[str]:
    return [f"S{d}" for d in range(x.dim())] + ["R", "T"] + (["P"] if x.is_floating_point() else [])


def as_dtensor(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A leaf DTensor; the terms of a Partial are random."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(x, mesh, whole).to_local().clone()
    for m, p in enumerate(placements):
        if p.is_partial():
            group = mesh.get_group(m)
            seed = torch.Generator().manual_seed(m + 1)  # the same noise on all ranks that hold this shard
            noise = [torch.randn(local.shape, generator=seed, dtype=torch.float64) for _ in range(group.size - 1)]
            local = [local - sum(noise), *noise][group.rank].clone()
            # ranks of the next Partial dims split this term in turn
    d = DTensor.from_local(local, mesh, placements, shape=x.shape)
    return d.requires_grad_() if x.is_floating_point() else d


def outputs_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def combinations(case: Case, xs: list[torch.Tensor], mesh: DeviceMesh) -> list[tuple[tuple[str, ...], ...]]:
    """For each input one code per mesh dim (a plain tensor is ``T`` on all)."""
    per_input = []
    for x in xs:
        codes = codes_for(x)
        plain = [("T",) * mesh.ndim]
        per_input.append(plain + list(itertools.product([c for c in codes if c != "T"], repeat=mesh.ndim)))
    every = [c for c in itertools.product(*per_input) if any(i[0] != "T" for i in c)]
    most = MOST_COMBINATIONS.get(mesh.shape, FEWER)
    if len(every) > most:
        wanted = {tuple((code,) for code in text.split()) for text in (*case.must, *case.never)} if mesh.ndim == 1 else set()
        chosen = random.Random(0).sample(every, most)
        every = chosen + sorted(wanted - set(chosen))
    return every


def check(case: Case, name: str, mesh: DeviceMesh) -> Counter[str]:
    """All combinations of one case; the counts of what happened."""
    generator = torch.Generator().manual_seed(0)
    xs = [make_input(spec, generator) for spec in case.inputs.split()]
    leaves = [x.clone().requires_grad_(x.is_floating_point() and case.gradients) for x in xs]
    expected = outputs_of(case.function(*[leaf * 1 if leaf.requires_grad else leaf.clone() for leaf in leaves]))
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in expected]
    grads = _gradients(expected, weights, leaves) if case.gradients else []
    counts: Counter[str] = Counter()
    for combination in combinations(case, xs, mesh):
        label = " ".join("".join(codes) for codes in combination)
        where = f"{name}[{label}] on {mesh.describe()}"
        error = _try(case, where, mesh, xs, combination, expected, weights, grads)
        agree(error is None, where)
        counts["refused" if error else "right"] += 1
        if mesh.ndim == 1:
            if label in case.must and error is not None and mesh.size() == 2:  # uneven parts may not fit a view
                raise AssertionError(f"{where} was refused") from error
            if label in case.never and error is None and mesh.size() > 1:
                raise AssertionError(f"{where} was not refused")
    return counts


def _gradients(
    outputs: list[Any], weights: list[torch.Tensor], leaves: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    loss = sum((y * w).sum() for y, w in zip(outputs, weights) if y.is_floating_point() and y.requires_grad)
    return list(torch.autograd.grad(loss, [x for x in leaves if x.requires_grad], allow_unused=True))


def _try(
    case: Case,
    where: str,
    mesh: DeviceMesh,
    xs: list[torch.Tensor],
    combination: tuple[tuple[str, ...], ...],
    expected: list[torch.Tensor],
    weights: list[torch.Tensor],
    grads: list[torch.Tensor | None],
) -> Exception | None:
    leaves: list[Any] = []
    for x, codes in zip(xs, combination):
        placements = [p for p in map(parse, codes) if p is not None]
        leaves.append(as_dtensor(x, mesh, placements) if placements else x.clone())
        leaves[-1].requires_grad_(x.is_floating_point() and case.gradients)
    inputs = [leaf * 1 if leaf.requires_grad else leaf.clone() for leaf in leaves]  # in-place needs no leaves
    again = [leaf.detach().clone() for leaf in leaves]
    try:
        found = outputs_of(case.function(*inputs))
    except UnsupportedOperatorError as error:
        return error
    repeated = outputs_of(case.function(*again))  # from the cache
    if len(found) != len(expected):
        raise AssertionError(f"{where}: {len(found)} results, expected {len(expected)}")
    full = []
    for y, second, wanted in zip(found, repeated, expected):
        if not isinstance(y, DTensor):  # no DTensor went into this one, or it was written to a plain tensor
            full.append(y)
            close(y, wanted, f"{where}: plain result")
            continue
        if tuple(y.shape) != tuple(wanted.shape) or y.to_local().shape != y.global_layout.local_shape:
            raise AssertionError(f"{where}: shape {tuple(y.shape)}, local {tuple(y.to_local().shape)}, for {wanted.shape}")
        if y.dtype != wanted.dtype:
            raise AssertionError(f"{where}: dtype {y.dtype}, expected {wanted.dtype}")
        full.append(y.full_tensor())
        close(full[-1], wanted, f"{where}: result as {y.global_layout.describe_placements()}")
        torch.testing.assert_close(second.to_local(), y.to_local().detach(), equal_nan=True, msg=f"{where}: cached result")
    if case.gradients:
        loss = sum((y * w).sum() for y, w in zip(full, weights) if y.is_floating_point() and y.requires_grad)
        loss.backward()
        for leaf, grad in zip([leaf for leaf in leaves if leaf.requires_grad], grads):
            compare_gradient(leaf, grad, where)
    return None


def compare_gradient(leaf: Any, expected: torch.Tensor | None, where: str) -> None:
    grad = leaf.grad
    if isinstance(grad, DTensor):
        layout = leaf.global_layout.gradient_layout
        if grad.global_layout != layout or grad.to_local().shape != layout.local_shape:
            raise AssertionError(f"{where}: gradient lies as {grad.global_layout.describe()}, expected {layout.describe()}")
        check_replicas(grad, where)
        grad = grad.full_tensor()
    if grad is None:
        grad = torch.zeros(tuple(leaf.shape), dtype=leaf.dtype)
    close(grad, torch.zeros_like(grad) if expected is None else expected, f"{where}: gradient")


def check_replicas(x: DTensor, where: str) -> None:
    """Where a tensor says it is replicated, the ranks hold the same."""
    platform, layout = get_platform(), x.global_layout
    local = x.to_local().detach()
    for m, p in enumerate(layout.placements):
        if p.is_replicate():
            every = platform.all_gather(local, layout.mesh.get_group(m))
            if not torch.equal(every, local.expand_as(every)):
                torch.testing.assert_close(every, local.expand_as(every), rtol=1e-12, atol=1e-12, msg=f"{where}: replicas differ")


def close(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{where}: {m}"
    )


def agree(accepted: bool, where: str) -> None:
    """All ranks decided alike."""
    group = mesh_of((torch.distributed.get_world_size(),)).get_group()
    seen = get_platform().all_gather(torch.tensor([int(accepted)]), group).flatten().tolist()
    if len(set(seen)) > 1:
        raise AssertionError(f"{where}: accepted on some ranks only: {seen}")
