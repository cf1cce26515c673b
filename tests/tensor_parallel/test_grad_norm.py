"""The gradient norm and clipping against one device, for every kind of parameter together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.tensor_parallel.cuts import cut_parts
from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank, this_world_size
from tests.tensor_parallel.arrays import values
from tests.tensor_parallel.parts import own_part


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
    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
    from tests.conformance import adapters as conformance
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    parameters: list[Any] = []
    grads: list[Any] = []
    for name, spec in specs(this_world_size()).items():
        local = own_part(gradients(poison)[name], spec)
        parameter = adapter.parameter(np.zeros_like(local))
        if spec is not None:
            parameter._shard_spec, parameter._shard_group = spec, adapter.mesh.get_group()
        parameters.append(parameter)
        # a view, as gradients of weights often are
        grads.append(adapter.turned(local))
    parameters.append(adapter.parameter(np.zeros(3)))  # without a gradient
    grads.append(None)
    more = parameters[:2] * tied
    given = {} if adapter.keeps_gradients else {"gradients": grads + grads[:2] * tied}
    if adapter.keeps_gradients:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
    with conformance.this_adapter().record_collectives() as collectives:
        norm = clip_grad_norm_(parameters + more, max_norm, order, error_if_nonfinite=strict, **given)
    return float(norm), [adapter.array(g) for g in grads[:-1]], len(collectives)


@on_groups(1, 2, 4)
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
def test_norm_and_clipping(platform: str, world_size: int, order: float) -> None:
    """Whole parameters count once (NeMo-RL#3788), and clipping takes cut and plain ones together (torchtune#2420)."""
    whole = gradients(None)
    norm = np.linalg.norm(np.concatenate([g.ravel() for g in whole.values()]), order)
    for max_norm in (norm / 3, norm * 2):
        factor = min(max_norm / (norm + 1e-6), 1.0)
        found = run_distributed(
            clip, max_norm, order, None, False, True, platform=platform, world_size=world_size
        )
        assert len({n for n, _, _ in found}) == 1
        for rank, (found_norm, clipped, collectives) in enumerate(found):
            assert found_norm == pytest.approx(norm, rel=1e-12)
            for (name, spec), local in zip(specs(world_size).items(), clipped):
                parts = [whole[name]] if spec is None else [whole[name][i] for i in spec.slices(rank)]
                expected = np.concatenate(parts, (spec and spec.dim) or 0) * factor
                np.testing.assert_allclose(local, expected, rtol=1e-12)
            assert collectives == 2 * (world_size > 1)  # of them one to make sure of the arguments, on CPU


@on_groups(2)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_not_finite(platform: str, world_size: int, poison: float, order: float) -> None:
    where: dict[str, Any] = {"platform": platform, "world_size": world_size}
    for norm, clipped, _ in run_distributed(clip, 1.0, order, poison, False, False, **where):
        np.testing.assert_equal(norm, poison)
        if np.isnan(poison):
            assert all(np.isnan(g).all() for g in clipped)
        else:  # as in PyTorch: finite elements become 0
            assert all(((g == 0) | np.isnan(g)).all() for g in clipped)
    for error in run_distributed(clip, 1.0, order, poison, True, False, expect_error=True, **where):
        assert error.type == "RuntimeError" and str(poison) in error.message


def clip_of_a_model(max_norm: float) -> dict[str, Any]:
    """A model with shared, tied and whole parameters: norm and clipped gradients beside one device's."""
    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.model_steps import beside_one_device

    adapter = this_adapter()
    plan = {"embed": "embedding_rowwise", "layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise",
            "layers.*.mlp.down": "rowwise", "head": "colwise_gather_output"}  # fmt: skip
    ids = adapter.tensor(np.random.default_rng(0).integers(0, 11, (2, 5)), "int64")
    one, own, named = beside_one_device(
        lambda: adapter.module("Tiny", False, True),
        lambda model: parallelize_module(model, adapter.mesh, plan),
        [ids],
    )
    grads = [adapter.tensor(part) for part, _ in own.parameters]
    parameters = list(named.values())
    given = {} if adapter.keeps_gradients else {"gradients": grads}
    if adapter.keeps_gradients:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
    norm = float(clip_grad_norm_(parameters, max_norm, **given))
    right = float(np.sqrt(sum((whole**2).sum() for whole, _ in one.parameters)))
    factor = min(max_norm / (right + 1e-6), 1.0)
    errors = [
        float(np.abs(adapter.array(grad) - own_part(whole, spec) * factor).max()) if own_part(whole, spec).size else 0.0
        for grad, (whole, _), (_, spec) in zip(grads, one.parameters, own.parameters)
    ]
    return {"norm": norm, "right": right, "worst": max(errors)}


@on_groups(1, 2, 4)
def test_clipping_a_model(platform: str, world_size: int) -> None:
    found = run_distributed(clip_of_a_model, 0.5, platform=platform, world_size=world_size)
    assert len({result["norm"] for result in found}) == 1
    for result in found:
        assert result["norm"] == pytest.approx(result["right"], rel=1e-12)
        assert result["worst"] < 1e-12


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


@pytest.mark.platform("torch")
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_as_pytorch_without_shared_parameters(order: float) -> None:
    assert run_distributed(as_torch, order, world_size=1) == [True]


def misuse(case: str) -> None:
    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
    from tests.tensor_parallel.adapters import this_adapter

    parameter = this_adapter().parameter(np.zeros(2))
    if case == "group":
        parameter._shard_spec = ShardSpec.chunk((4,), 0, 2)
    if case == "uncut":
        parameter._shard_spec = ShardSpec.chunk((4,), 0, 2)
    size = {"shape": 3, "uncut": 4}.get(case, 2)
    grads = [this_adapter().tensor(np.ones(size))] * (2 if case == "count" else 1)
    clip_grad_norm_([parameter], 1.0, 0.0 if case == "order" else 2.0, gradients=grads)


@on_groups(1)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("order", "must be positive"),
        ("group", "_shard_group"),
        ("count", "2 gradients for 1 parameters"),
        ("shape", "gradient 0 has shape (3,), its parameter (2,)"),
        ("uncut", "gradient 0 has shape (4,), its parameter (2,)"),
    ],
)
def test_misuse(platform: str, world_size: int, case: str, text: str) -> None:
    for error in run_distributed(misuse, case, platform=platform, world_size=world_size, expect_error=True):
        assert error.type == "ValueError" and text in error.message


def wrong_on_one_rank() -> dict[str, str]:
    """What each call raises whose arguments the last rank alone has wrong, or otherwise."""
    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.test_uneven import said

    adapter, last = this_adapter(), this_rank() == 1
    parameters = [adapter.parameter(np.zeros(2)) for _ in range(2)]
    for parameter in parameters:
        parameter._shard_spec, parameter._shard_group = ShardSpec.chunk((4,), 0, 2), adapter.mesh.get_group()

    def call(gradients: Any = None, max_norm: Any = 1.0, order: Any = 2.0, strict: Any = False) -> Any:
        grads = [adapter.tensor(np.ones(2)) for _ in parameters]
        given = gradients(grads) if last and gradients else grads
        options = [value[last] if isinstance(value, tuple) else value for value in (max_norm, order, strict)]
        return lambda: clip_grad_norm_(parameters, *options, gradients=given)

    return said({
        "short": call(lambda g: g[:1]),
        "text": call(lambda g: [g[0], "a"]),
        "shape": call(lambda g: [g[0], adapter.tensor(np.ones(3))]),
        "limit": call(max_norm=(1.0, 2.0)),
        "no limit": call(max_norm=(1.0, "x")),
        "order": call(order=(2.0, float("inf"))),
        "strict": call(strict=(False, True)),
        "none": call(lambda g: [None, g[1]]),
    })  # fmt: skip


@on_groups(2)
def test_arguments_of_one_rank_only(platform: str, world_size: int) -> None:
    one, other = run_distributed(wrong_on_one_rank, platform=platform, world_size=world_size)
    assert one == other
    for call, text in {
        "short": "ValueError: rank 1: 1 gradients for 2 parameters",
        "text": "TypeError: rank 1: gradient 1 is a str; expected a tensor or None",
        "shape": "ValueError: rank 1: gradient 1 has shape (3,), its parameter (2,)",
        "limit": "max_norm=1.0, norm_type=2.0, error_if_nonfinite=False on rank 0, max_norm=2.0",
        "no limit": "ValueError: rank 1: could not convert string to float: 'x'",
        "order": "norm_type=inf",
        "strict": "error_if_nonfinite=True on rank 1; expected the same everywhere",
        "none": "nothing",
    }.items():
        assert text in one[call], call


def without_gradients() -> None:
    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
    from tests.tensor_parallel.adapters import this_adapter

    clip_grad_norm_([this_adapter().parameter(np.zeros(2))], 1.0)


def by_name() -> tuple[list[float], list[np.ndarray], list[str]]:
    """Two parameters of one shape, their gradients by name in another order; then names that do not fit."""
    import mindspore
    from mindspore import Parameter, Tensor, ops

    from hyper_parallel.core.device_mesh import init_device_mesh
    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_

    cut, whole = (Parameter(Tensor(np.ones(2, np.float32)), name=name) for name in ("cut", "whole"))
    group = init_device_mesh("cpu", (this_world_size(),)).get_group()
    cut._shard_spec, cut._shard_group = ShardSpec.chunk((4,), 0, 2), group
    step = mindspore.value_and_grad(lambda: ops.sum(3 * cut + 4 * whole), None, [whole, cut], return_ids=True)
    named = dict(step()[1])
    norm = float(clip_grad_norm_([cut, whole], 1.0, gradients=named))
    only = float(clip_grad_norm_([cut, whole], 9.0, gradients={"whole": named["whole"]}))
    refused = []
    for parameters, gradients in (([cut], named), ([cut, Parameter(whole, name="cut")], {})):
        try:
            clip_grad_norm_(parameters, 1.0, gradients=gradients)
        except ValueError as error:
            refused.append(str(error))
    return [norm, only], [named[name].asnumpy() for name in ("cut", "whole")], refused


@pytest.mark.platform("mindspore")
def test_gradients_by_name() -> None:
    for (norm, only), (cut, whole), refused in run_distributed(by_name, platform="mindspore", world_size=2):
        right = np.sqrt(4 * 3**2 + 2 * 4**2)  # four elements of the one, two of the other
        assert norm == pytest.approx(right, rel=1e-6) and only == pytest.approx(np.sqrt(32) / right, rel=1e-5)
        np.testing.assert_allclose(cut, 3 / right, rtol=1e-5)
        np.testing.assert_allclose(whole, 4 / right, rtol=1e-5)
        assert "gradients of ['whole']" in refused[0] and "two parameters are called 'cut'" in refused[1]


@pytest.mark.platform("mindspore")
def test_mindspore_needs_the_gradients() -> None:
    for error in run_distributed(without_gradients, platform="mindspore", world_size=1, expect_error=True):
        assert error.type == "PlatformError" and "gradients=grads" in error.message
