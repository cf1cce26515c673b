"""In the workers: gradients through every collective and region, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, get_platform
from hyper_parallel.core.layout import Layout
from hyper_parallel.loss_parallel import loss_parallel
from tests.mindspore.op_checks import mesh_of

_PLACEMENTS = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}


def data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def through(source: str, target: str) -> None:
    """``sum(w * redistribute(x)^2)``: the gradient of the whole tensor is ``2 w x``, whatever the number of ranks.

    Second derivatives as well: of ``sum(grad^2)`` it is ``8 w^2 x``.
    """
    platform = get_platform()
    size = platform.world_size()
    mesh = mesh_of((size,))
    x, w = data(5, 3), data(5, 3, seed=1)
    before = Layout(mesh, [_PLACEMENTS[source]], x.shape)
    after = before.replace([_PLACEMENTS[target]])
    term = np.float32(1 / size) if source == "P" else np.float32(1)
    local = Tensor(x[tuple(slice(lo, hi) for lo, hi in before.local_ranges())] * term)

    def loss(local: Tensor) -> Tensor:
        moved = DTensor.from_local(local, mesh, before.placements, shape=x.shape).redistribute(
            placements=after.placements
        )
        whole = moved.full_tensor()
        return platform.sum_tokens(whole * whole * Tensor(w))

    value, grad = mindspore.value_and_grad(loss)(local)
    np.testing.assert_allclose(value.asnumpy(), (x * x * w).sum(), rtol=1e-5)
    part = tuple(slice(lo, hi) for lo, hi in before.gradient_layout.local_ranges())
    np.testing.assert_allclose(grad.asnumpy(), (2 * w * x)[part], rtol=1e-5, atol=1e-6)


def layer(kind: str) -> None:
    """A column- or row-parallel product in an ``nn.Cell``: gradients of weight shard and input are one device's."""
    platform = get_platform()
    size = platform.world_size()
    mesh = mesh_of((size,))
    x, w, b = data(4, 8), data(8, 8, seed=1), data(8, seed=2)
    weight_dim = 0 if kind == "column" else 1
    cut = Layout(mesh, [Shard(weight_dim)], w.shape)
    part = tuple(slice(lo, hi) for lo, hi in cut.local_ranges())

    class Layer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(Tensor(np.ascontiguousarray(w[part])), name="weight")
            self.bias = Parameter(Tensor(b), name="bias")

        def construct(self, x: Tensor) -> Tensor:
            shared = distribute_tensor(x, mesh, [Replicate() if kind == "column" else Shard(1)])
            weight = DTensor.from_local(self.weight, mesh, cut.placements, shape=w.shape)
            bias = distribute_tensor(self.bias, mesh, [Shard(0) if kind == "column" else Replicate()])
            y = ops.dense(shared, weight, bias).full_tensor()
            return platform.sum_tokens(y * y)

    cell = Layer()
    value, (grad_x, grads) = mindspore.value_and_grad(cell, 0, cell.trainable_params())(Tensor(x))
    y = x @ w.T + b
    by_name = {p.name: g.asnumpy() for p, g in zip(cell.trainable_params(), grads)}
    np.testing.assert_allclose(value.asnumpy(), (y * y).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad_x.asnumpy(), 2 * y @ w, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(by_name["weight"], (2 * y.T @ x)[part], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(by_name["bias"], 2 * y.sum(0), rtol=1e-5, atol=1e-4)


ENTRIES: dict[str, Callable[..., Any]] = {
    "ops": lambda logits, labels: ops.cross_entropy(logits, labels),
    "mint": lambda logits, labels: mint.nn.functional.cross_entropy(logits, labels),
    "nn": lambda logits, labels: nn.CrossEntropyLoss()(logits, labels),
    "mint.nn": lambda logits, labels: mint.nn.CrossEntropyLoss()(logits, labels),
}


def training(entry: str) -> None:
    """A step of a tied embedding and head inside an ``nn.Cell``, over weights and inputs, repeated."""
    platform = get_platform()
    size = platform.world_size()
    mesh = mesh_of((size,))
    vocab, width, tokens = 11, 6, 5
    table, labels = data(vocab, width), np.array([3, 0, 10, -100, 7], np.int32)
    hidden = data(tokens, width, seed=3)
    cut = Layout(mesh, [Shard(0)], table.shape)
    part = tuple(slice(lo, hi) for lo, hi in cut.local_ranges())
    ids = np.array([1, 4, 4, 9, 10], np.int32)

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.table = Parameter(Tensor(np.ascontiguousarray(table[part])), name="table")

        def construct(self, hidden: Tensor) -> Tensor:
            shared = DTensor.from_local(self.table, mesh, cut.placements, shape=table.shape)
            looked_up = ops.gather(shared, Tensor(ids), 0).redistribute(placements=[Replicate()])
            x = looked_up + distribute_tensor(hidden, mesh, [Replicate()])
            logits = ops.matmul(x, shared.T)
            with loss_parallel():
                return ENTRIES[entry](logits, Tensor(labels)).to_local()

    model = Model()
    step = mindspore.value_and_grad(model, 0, model.trainable_params())
    x = table[ids] + hidden
    logits = x.astype(np.float64) @ table.T
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    kept = labels != -100
    grad_logits = np.exp(log_probs)
    grad_logits[np.arange(tokens), np.where(kept, labels, 0)] -= 1
    grad_logits = grad_logits * kept[:, None] / kept.sum()
    grad_x = grad_logits @ table
    grad_table = grad_logits.T @ x
    np.add.at(grad_table, ids, grad_x)
    for _ in range(2):
        value, (found_x, (found_table,)) = step(Tensor(hidden))
        expected = -(log_probs[np.arange(tokens), np.where(kept, labels, 0)] * kept).sum() / kept.sum()
        np.testing.assert_allclose(value.asnumpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(found_x.asnumpy(), grad_x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found_table.asnumpy(), grad_table[part], rtol=1e-5, atol=1e-6)


class Copy(nn.Cell):
    """Identity forward, all-reduce backward, for the compiler: what the documentation of custom_grad says."""

    def __init__(self, all_reduce: Any) -> None:
        super().__init__()
        self.all_reduce = all_reduce

    def construct(self, x: Tensor) -> Tensor:
        return x

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.all_reduce(dout),)


class Scaled(nn.Cell):
    """Each rank multiplies by a number of its own."""

    def __init__(self, all_reduce: Any, factor: float) -> None:
        super().__init__()
        self.copy_to_all = Copy(all_reduce)
        self.factor = factor

    def construct(self, x: Tensor) -> Tensor:
        return (self.copy_to_all(x) * self.factor).sum()


def compiled() -> None:
    """The graph-mode route: a cell's own ``bprop``, with the group's operator in it, under jit."""
    platform = get_platform()
    group = mesh_of((platform.world_size(),)).get_group()
    network = Scaled(group.handle.operator("AllReduce", "sum"), 1.0 + group.rank)
    step = mindspore.value_and_grad(network)

    @mindspore.jit
    def run(x: Tensor) -> Any:
        return step(x)

    for function in (step, run):
        value, grad = function(Tensor(np.ones(3, np.float32)))
        assert float(value) == 3 * (1 + group.rank)
        np.testing.assert_array_equal(grad.asnumpy(), np.full(3, 3.0, np.float32))
