"""The layers against one device: values, gradients, collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.arrays import pieces, values
from tests.tensor_parallel.parts import whole_of

IN, OUT, BATCH, LENGTH = 6, 5, 2, 7  # 5 over 4 ranks: (2, 2, 1, 0)


def linear_layer(
    kind: str, options: dict[str, Any], x: list[np.ndarray], upstream: list[np.ndarray], dtype: str
) -> Any:
    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    make = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind]
    call = {"sequence_length": LENGTH} if options.get("sequence_parallel") and kind == "column" else {}
    layer = make(IN, OUT, group=adapter.mesh["tp"], dtype=adapter.dtype(dtype), **options)
    parameters = [layer.weight] + ([layer.bias] if layer.bias is not None else [])
    for parameter, whole in zip(parameters, (values(OUT, IN, seed=1), values(OUT, seed=2))):
        adapter.fill(parameter, whole)
    return adapter.differentiate(
        lambda x: layer(x, **call), [adapter.tensor(x[this_rank()], dtype)], parameters, upstream[this_rank()]
    )


def check_linear(
    kind: str,
    platform: str,
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
    grad_x = upstream @ weight
    of_parameters = [flat.T @ flat_x] + ([flat.sum(0)] if with_bias else [])

    def laid(a: np.ndarray, dim: int | None) -> list[np.ndarray]:
        return [a] * world_size if dim is None else pieces(a, dim, world_size)

    found = run_distributed(
        linear_layer, kind, options, laid(x, x_dim), laid(upstream, y_dim), dtype,
        platform=platform, world_size=world_size,
    )  # fmt: skip
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    for rank, result in enumerate(found):
        np.testing.assert_allclose(result.value, laid(y, y_dim)[rank], **close)
        np.testing.assert_allclose(result.inputs[0], laid(grad_x, x_dim)[rank], **close)
        assert (result.forward, result.backward) == ((forward, backward) if world_size > 1 else ({}, {}))
    for index, right in enumerate(of_parameters):
        whole = whole_of([result.parameters[index] for result in found], tolerance)
        np.testing.assert_allclose(whole, right, **close)


COLUMN_CASES = [
    pytest.param({}, None, -1, {}, {"all_reduce": 1}, marks=pytest.mark.contract("T1"), id="plain"),
    pytest.param({"overlap": False}, None, -1, {}, {"all_reduce": 1}, id="no overlap"),
    pytest.param({"bias": False}, None, -1, {}, {"all_reduce": 1}, id="no bias"),
    pytest.param({"gather_output": True}, None, None, {"all_gather": 1}, {"all_reduce": 1}, id="gathered"),
    pytest.param(
        {"sequence_parallel": True},
        1,
        -1,
        {"all_gather": 2},  # of them one to make sure of the lengths, on CPU
        {"reduce_scatter": 1},
        id="sequence parallel",
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
        {"reduce_scatter": 1, "all_gather": 1},  # whether all ranks hold the whole sequence is asked first, on CPU
        {"all_gather": 1, "all_reduce": 1},  # the bias has all tokens' gradient
        id="sequence parallel",
    ),
]


@on_groups(1, 2, 4)
@pytest.mark.parametrize(("options", "x_dim", "y_dim", "forward", "backward"), COLUMN_CASES)
def test_column(
    platform: str, world_size: int, options: Any, x_dim: Any, y_dim: Any, forward: Any, backward: Any
) -> None:
    check_linear("column", platform, world_size, options, x_dim, y_dim, forward, backward)


@on_groups(1, 2, 4)
@pytest.mark.parametrize(("options", "x_dim", "y_dim", "forward", "backward"), ROW_CASES)
def test_row(
    platform: str, world_size: int, options: Any, x_dim: Any, y_dim: Any, forward: Any, backward: Any
) -> None:
    check_linear("row", platform, world_size, options, x_dim, y_dim, forward, backward)


@pytest.mark.parametrize(
    ("platform", "dtype", "tolerance"),
    [
        ("torch", "float32", 1e-5),
        ("torch", "bfloat16", 0.2),
        ("mindspore", "float32", 1e-5),
        ("mindspore", "float16", 0.05),  # MindSpore's CPU backend has no matrix product of bfloat16
    ],
)
def test_dtypes(platform: str, dtype: str, tolerance: float) -> None:
    check_linear("column", platform, 2, {}, None, -1, {}, {"all_reduce": 1}, dtype, tolerance)
    check_linear("row", platform, 2, {}, -1, None, {"all_reduce": 1}, {}, dtype, tolerance)


def bias_once() -> tuple[np.ndarray, np.ndarray]:
    """An output, and the gradient of the bias under a gradient of ones."""
    from hyper_parallel.tensor_parallel.layers import RowParallelLinear
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    layer = RowParallelLinear(4, 3, group=adapter.mesh, dtype=adapter.dtype("float64"))
    adapter.fill(layer.weight, np.zeros((3, 4)))
    adapter.fill(layer.bias, np.array([100.0, 200.0, 300.0]))
    found = adapter.differentiate(layer, [adapter.tensor(np.ones((2, 2)))], [layer.bias])
    return found.value, found.parameters[0][0]


@pytest.mark.contract("T2")
@on_groups(2)
def test_row_bias_is_added_once(platform: str, world_size: int) -> None:
    """Not P times (text-generation-inference#1036, Paddle#35186), nor with a gradient over P (torchtitan#4332)."""
    for y, grad in run_distributed(bias_once, platform=platform, world_size=world_size):
        np.testing.assert_array_equal(y, [[100, 200, 300]] * 2)
        np.testing.assert_array_equal(grad, [2, 2, 2])


def all_ones_gradient() -> float:
    from hyper_parallel.tensor_parallel.layers import RowParallelLinear
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    layer = RowParallelLinear(2, 1, bias=False, group=adapter.mesh, dtype=adapter.dtype("float64"))
    adapter.fill(layer.weight, np.ones((1, 2)))
    found = adapter.differentiate(layer, [adapter.tensor(np.ones((1, 1)))], [layer.weight])
    return float(found.parameters[0][0][0, 0])


@on_groups(2)
def test_row_gradient_is_not_multiplied_by_the_ranks(platform: str, world_size: int) -> None:
    assert run_distributed(all_ones_gradient, platform=platform, world_size=world_size) == [1.0, 1.0]


def partial_plus_replicated() -> np.ndarray:
    """``(row(x) + r) w``: the gradients of x and r are those of one device."""
    from hyper_parallel.tensor_parallel.layers import RowParallelLinear
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    layer = RowParallelLinear(4, 3, bias=False, group=adapter.mesh, dtype=adapter.dtype("float64"))
    adapter.fill(layer.weight, values(3, 4, seed=1))
    x = adapter.tensor(pieces(values(2, 4), 1, 2)[this_rank()])
    r = adapter.tensor(values(2, 3, seed=2))
    found = adapter.differentiate(lambda x, r: layer(x) + r, [x, r], upstream=values(2, 3, seed=3))
    return np.concatenate(found.inputs, 1)


@on_groups(2)
def test_partial_plus_replicated(platform: str, world_size: int) -> None:
    """A sum of both once multiplied the gradients before it by P (torchtitan#2106)."""
    upstream, weight = values(2, 3, seed=3), values(3, 4, seed=1)
    found = run_distributed(partial_plus_replicated, platform=platform, world_size=world_size)
    for rank, grads in enumerate(found):
        expected = np.concatenate([pieces(upstream @ weight, 1, 2)[rank], upstream], 1)
        np.testing.assert_allclose(grads, expected, rtol=1e-12)
