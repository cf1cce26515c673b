"""The layers against one device: values, gradients, collectives, initial weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.shard_spec import ShardSpec
from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.arrays import pieces, values

pytestmark = pytest.mark.platform("torch")
WORLD_SIZES = (1, 2, 4)
IN, OUT, BATCH, LENGTH = 6, 5, 2, 7  # 5 over 4 ranks: (2, 2, 1, 0)


def set_parameters(layer: Any, **whole: np.ndarray) -> None:
    """Give a layer its part of whole parameters."""
    import torch

    from tests.tensor_parallel.torch_workers import tensor

    for name, array in whole.items():
        parameter = getattr(layer, name)
        spec: ShardSpec = parameter._shard_spec
        parts = [array[index] for index in spec.slices(this_rank())]
        with torch.no_grad():
            parameter.copy_(tensor(np.concatenate(parts, spec.dim or 0)))


def whole_gradient(parameter: Any) -> np.ndarray:
    """The gradient of the whole parameter, put together in NumPy from every rank's part."""
    import torch.distributed as dist

    from tests.tensor_parallel.torch_workers import array

    spec: ShardSpec = parameter._shard_spec
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, array(parameter.grad))
    if spec.dim is None:
        for part in parts[1:]:  # equal on every rank
            np.testing.assert_allclose(part, parts[0], rtol=1e-12)
        return parts[0]
    return np.concatenate(parts, spec.dim)


def linear_layer(
    kind: str, options: dict[str, Any], x: list[np.ndarray], upstream: list[np.ndarray], dtype: str
) -> dict[str, Any]:
    import torch

    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from tests.tensor_parallel.torch_workers import array, count_collectives, tensor, tp_mesh

    make = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind]
    call = {"sequence_length": LENGTH} if options.get("sequence_parallel") and kind == "column" else {}
    layer = make(IN, OUT, group=tp_mesh()["tp"], dtype=getattr(torch, dtype), **options)
    parameters = {"weight": values(OUT, IN, seed=1), "bias": values(OUT, seed=2)}
    set_parameters(layer, **{k: v for k, v in parameters.items() if getattr(layer, k) is not None})
    own = tensor(x[this_rank()], dtype, grad=True)
    with count_collectives() as forward:
        y = layer(own, **call)
    with count_collectives() as backward:
        y.backward(tensor(upstream[this_rank()], dtype))
    return {
        "y": array(y),
        "x": array(own.grad),
        "weight": whole_gradient(layer.weight),
        "bias": whole_gradient(layer.bias) if layer.bias is not None else None,
        "forward": forward,
        "backward": backward,
    }


def check_linear(
    kind: str,
    world_size: int,
    options: dict[str, Any],
    x_dim: int | None,
    y_dim: int | None,
    forward: dict[str, int],
    backward: dict[str, int],
    dtype: str = "float64",
    tolerance: float = 1e-12,
) -> None:
    """Compare with ``y = x W^T + b`` in NumPy; x and y lie sharded along their dims, or whole."""
    x, weight, bias = values(BATCH, LENGTH, IN), values(OUT, IN, seed=1), values(OUT, seed=2)
    with_bias = options.get("bias", True)
    y = x @ weight.T + (bias if with_bias else 0)
    upstream = values(*y.shape, seed=3)
    flat, flat_x = upstream.reshape(-1, OUT), x.reshape(-1, IN)
    right = {"y": y, "x": upstream @ weight, "weight": flat.T @ flat_x, "bias": flat.sum(0)}

    def laid(a: np.ndarray, dim: int | None) -> list[np.ndarray]:
        return [a] * world_size if dim is None else pieces(a, dim, world_size)

    found = run_distributed(
        linear_layer, kind, options, laid(x, x_dim), laid(upstream, y_dim), dtype, world_size=world_size
    )
    for rank, result in enumerate(found):
        np.testing.assert_allclose(result["y"], laid(y, y_dim)[rank], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(result["x"], laid(right["x"], x_dim)[rank], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(result["weight"], right["weight"], rtol=tolerance, atol=tolerance)
        if with_bias:
            np.testing.assert_allclose(result["bias"], right["bias"], rtol=tolerance, atol=tolerance)
        if world_size > 1:
            assert (result["forward"], result["backward"]) == (forward, backward)
        else:
            assert (result["forward"], result["backward"]) == ({}, {})


COLUMN_CASES = [
    pytest.param({}, None, -1, {}, {"all_reduce": 1}, marks=pytest.mark.contract("T1"), id="plain"),
    pytest.param({"overlap": False}, None, -1, {}, {"all_reduce": 1}, id="no overlap"),
    pytest.param({"bias": False}, None, -1, {}, {"all_reduce": 1}, id="no bias"),
    pytest.param({"gather_output": True}, None, None, {"all_gather": 1}, {"all_reduce": 1}, id="gathered"),
    pytest.param(
        {"sequence_parallel": True}, 1, -1, {"all_gather": 1}, {"reduce_scatter": 1}, id="sequence parallel"
    ),
]
ROW_CASES = [
    pytest.param({}, -1, None, {"all_reduce": 1}, {}, marks=pytest.mark.contract("T2"), id="plain"),
    pytest.param({"bias": False}, -1, None, {"all_reduce": 1}, {}, id="no bias"),
    pytest.param(
        {"input_is_parallel": False}, None, None, {"all_reduce": 1}, {"all_gather": 1}, id="whole input"
    ),
    pytest.param(
        {"sequence_parallel": True},
        -1,
        1,
        {"reduce_scatter": 1},
        {"all_gather": 1, "all_reduce": 1},  # the bias has all tokens' gradient
        id="sequence parallel",
    ),
]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("options", "x_dim", "y_dim", "forward", "backward"), COLUMN_CASES)
def test_column(world_size: int, options: Any, x_dim: Any, y_dim: Any, forward: Any, backward: Any) -> None:
    check_linear("column", world_size, options, x_dim, y_dim, forward, backward)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("options", "x_dim", "y_dim", "forward", "backward"), ROW_CASES)
def test_row(world_size: int, options: Any, x_dim: Any, y_dim: Any, forward: Any, backward: Any) -> None:
    check_linear("row", world_size, options, x_dim, y_dim, forward, backward)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.2)])
def test_dtypes(dtype: str, tolerance: float) -> None:
    check_linear("column", 2, {}, None, -1, {}, {"all_reduce": 1}, dtype, tolerance)
    check_linear("row", 2, {}, -1, None, {"all_reduce": 1}, {}, dtype, tolerance)


def bias_once() -> np.ndarray:
    import torch

    from hyper_parallel.tensor_parallel.layers import RowParallelLinear
    from tests.tensor_parallel.torch_workers import array, tensor, tp_mesh

    layer = RowParallelLinear(4, 3, group=tp_mesh(), dtype=torch.float64)
    set_parameters(layer, weight=np.zeros((3, 4)), bias=np.array([100.0, 200.0, 300.0]))
    return array(layer(tensor(np.ones((2, 2)))))


@pytest.mark.contract("T2")
def test_row_bias_is_added_once() -> None:
    for y in run_distributed(bias_once, world_size=2):
        np.testing.assert_array_equal(y, [[100, 200, 300]] * 2)


def all_ones_gradient() -> float:
    import torch

    from hyper_parallel.tensor_parallel.layers import RowParallelLinear
    from tests.tensor_parallel.torch_workers import tensor, tp_mesh

    layer = RowParallelLinear(2, 1, bias=False, group=tp_mesh(), dtype=torch.float64)
    set_parameters(layer, weight=np.ones((1, 2)))
    layer(tensor(np.ones((1, 1)))).sum().backward()
    return float(layer.weight.grad)


def test_row_gradient_is_not_multiplied_by_the_ranks() -> None:
    assert run_distributed(all_ones_gradient, world_size=2) == [1.0, 1.0]


def partial_plus_replicated() -> np.ndarray:
    """``(row(x) + r) w``: the gradients of x and r are those of one device."""
    import torch

    from hyper_parallel.tensor_parallel.layers import RowParallelLinear
    from tests.tensor_parallel.torch_workers import array, tensor, tp_mesh

    layer = RowParallelLinear(4, 3, bias=False, group=tp_mesh(), dtype=torch.float64)
    set_parameters(layer, weight=values(3, 4, seed=1))
    x = tensor(pieces(values(2, 4), 1, 2)[this_rank()], grad=True)
    r = tensor(values(2, 3, seed=2), grad=True)
    ((layer(x) + r) * tensor(values(2, 3, seed=3))).sum().backward()
    return np.concatenate([array(x.grad), array(r.grad)], 1)


def test_partial_plus_replicated() -> None:
    upstream, weight = values(2, 3, seed=3), values(3, 4, seed=1)
    for rank, found in enumerate(run_distributed(partial_plus_replicated, world_size=2)):
        expected = np.concatenate([pieces(upstream @ weight, 1, 2)[rank], upstream], 1)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def autocast_matches() -> float:
    import torch

    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear
    from tests.tensor_parallel.torch_workers import tensor, tp_mesh

    x = tensor(values(3, IN), "float32")
    found = []
    for overlap in (True, False):
        layer = ColumnParallelLinear(IN, OUT, group=tp_mesh(), dtype=torch.float32, overlap=overlap)
        layer.reset_parameters(seed=5)
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(own)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        found.append((own.grad, layer.weight.grad, layer.bias.grad))
    return max(float((a - b).abs().max()) for a, b in zip(*found))


def test_autocast() -> None:
    assert max(run_distributed(autocast_matches, world_size=2)) < 0.05


def order_of_backward(overlap: bool) -> list[str]:
    """What backward starts first: the sum over the ranks, or the weight's gradient."""
    from unittest import mock

    import torch
    import torch.distributed as dist

    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear
    from tests.tensor_parallel.torch_workers import tensor, tp_mesh

    events: list[str] = []
    layer = ColumnParallelLinear(IN, OUT, group=tp_mesh(), dtype=torch.float64, overlap=overlap)
    x = tensor(values(3, IN), grad=True)
    y = layer(x)
    real = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("async sum" if kwargs.get("async_op") else "sum")
        return real(*args, **kwargs)

    layer.weight.register_hook(lambda grad: events.append("weight"))
    with mock.patch.object(dist, "all_reduce", noted):
        y.sum().backward()
    return events


@pytest.mark.contract("T1")
def test_the_sum_overlaps_the_gradient_of_the_weight() -> None:
    assert run_distributed(order_of_backward, True, world_size=2) == [["async sum", "weight"]] * 2
    assert sorted(run_distributed(order_of_backward, False, world_size=2)[0]) == ["sum", "weight"]
