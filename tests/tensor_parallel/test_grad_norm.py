"""The gradient norm and clipping against one device, for every kind of parameter together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.tensor_parallel.cuts import cut_parts
from tests.harness import run_distributed, this_rank, this_world_size
from tests.tensor_parallel.arrays import values

pytestmark = pytest.mark.platform("torch")
WORLD_SIZES = (1, 2, 4)


def specs(ranks: int) -> dict[str, ShardSpec | None]:
    """Sharded, uneven, fused with shared heads, key/value heads, marked as whole, and unmarked."""
    return {
        "rows": ShardSpec.chunk((5, 3), 0, ranks),
        "columns": ShardSpec.chunk((3, 5), 1, ranks),
        "fused": cut_parts((24, 2), 0, (16, 4, 4), (8, 2, 2), ranks),
        "heads": cut_parts((4, 3), 0, (4,), (2,), ranks),
        "marked": ShardSpec.replicated((4,), ranks),
        "plain": None,
    }


def gradients(poison: float | None) -> dict[str, np.ndarray]:
    found = {}
    for seed, (name, spec) in enumerate(specs(1).items()):
        found[name] = values(*(spec.shape if spec else (2, 2)), seed=seed)
    if poison is not None:
        found["rows"][0, 0] = poison  # on one rank
    return found


def clip(max_norm: float, order: float, poison: float | None, strict: bool, tied: bool) -> Any:
    import torch

    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
    from tests.tensor_parallel.torch_workers import array, count_collectives, tensor, tp_mesh

    group = tp_mesh().get_group()
    parameters = []
    for name, spec in specs(this_world_size()).items():
        whole = gradients(poison)[name]
        parts = [whole] if spec is None else [whole[i] for i in spec.slices(this_rank())]
        local = np.concatenate(parts, spec.dim or 0) if spec is not None else whole
        parameter: Any = torch.nn.Parameter(tensor(np.zeros_like(local)))
        parameter.grad = tensor(local)
        if spec is not None:
            parameter._shard_spec, parameter._shard_group = spec, group
        parameters.append(parameter)
    parameters.append(torch.nn.Parameter(torch.zeros(3)))  # without a gradient
    with count_collectives() as collectives:
        norm = clip_grad_norm_(
            parameters + parameters[:2] * tied, max_norm, order, error_if_nonfinite=strict
        )
    return float(norm), [array(p.grad) for p in parameters[:-1]], collectives


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
def test_norm_and_clipping(world_size: int, order: float) -> None:
    whole = gradients(None)
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in whole.values()]), order)
    for max_norm in (norm / 3, norm * 2):
        factor = min(max_norm / (norm + 1e-6), 1.0)
        found = run_distributed(clip, max_norm, order, None, False, True, world_size=world_size)
        assert len({n for n, _, _ in found}) == 1
        for rank, (found_norm, clipped, collectives) in enumerate(found):
            assert found_norm == pytest.approx(norm, rel=1e-12)
            for (name, spec), local in zip(specs(world_size).items(), clipped):
                parts = [whole[name]] if spec is None else [whole[name][i] for i in spec.slices(rank)]
                expected = np.concatenate(parts, (spec and spec.dim) or 0) * factor
                np.testing.assert_allclose(local, expected, rtol=1e-12)
            assert sum(collectives.values()) == (world_size > 1)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_not_finite(poison: float, order: float) -> None:
    for norm, clipped, _ in run_distributed(clip, 1.0, order, poison, False, False, world_size=2):
        np.testing.assert_equal(norm, poison)
        if np.isnan(poison):
            assert all(np.isnan(g).all() for g in clipped)
        else:  # as in PyTorch: finite elements become 0
            assert all(((g == 0) | np.isnan(g)).all() for g in clipped)
    for error in run_distributed(clip, 1.0, order, poison, True, False, world_size=2, expect_error=True):
        assert error.type == "RuntimeError" and str(poison) in error.message


def as_torch(order: float) -> bool:
    """Without shared parameters: PyTorch's function."""
    import torch

    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_

    results = []
    for function in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        model(torch.randn(5, 3)).square().sum().backward()
        norm = function(model.parameters(), 0.1, order)
        results.append([norm, *(p.grad for p in model.parameters())])
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*results))


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_as_pytorch_without_shared_parameters(order: float) -> None:
    assert run_distributed(as_torch, order, world_size=1) == [True]


def misuse(case: str) -> None:
    import torch

    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_

    parameter: Any = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    if case == "group":
        parameter._shard_spec = ShardSpec.chunk((4,), 0, 2)
    clip_grad_norm_([parameter], 1.0, 0.0 if case == "order" else 2.0)


@pytest.mark.parametrize(("case", "text"), [("order", "must be positive"), ("group", "_shard_group")])
def test_misuse(case: str, text: str) -> None:
    for error in run_distributed(misuse, case, world_size=1, expect_error=True):
        assert error.type == "ValueError" and text in error.message
