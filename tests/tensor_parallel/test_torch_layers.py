"""Layers under autocast, and the order of their backward: PyTorch alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed
from tests.tensor_parallel.arrays import values

pytestmark = pytest.mark.platform("torch")
IN, OUT = 6, 5


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


def twice() -> str:
    import torch

    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear
    from tests.tensor_parallel.torch_workers import tensor, tp_mesh

    layer = ColumnParallelLinear(IN, OUT, group=tp_mesh(), dtype=torch.float64, overlap=True)
    x = tensor(values(3, IN), grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as raised:
        grad.square().sum().backward()
    return str(raised.value)


def test_a_second_derivative_is_refused() -> None:
    """Not taken for a constant: the upstream gradient requires none here."""
    for message in run_distributed(twice, world_size=2):
        assert "a column-parallel linear layer cannot be differentiated twice" in message
