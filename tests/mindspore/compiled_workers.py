"""In the workers: a function that MindSpore compiles reaches a DTensor in every way there is, in each capture mode."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.graph import jit_trace
from mindspore.graph._utils import pijit_context

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    linear_cross_entropy,
    parallelize_module,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_topk,
)
from hyper_parallel.loss_parallel import loss_parallel
from hyper_parallel.platform.mindspore._bytecode_capture import refuse_arguments
from hyper_parallel.platform.mindspore.dtensor import TensorBase
from hyper_parallel.tensor_parallel.regions import reduce_from_tp_region
from tests.mindspore.bypass_workers import X, refused
from tests.mindspore.op_checks import mesh_of

LABELS = np.array([0, 3, 7, 1], np.int32)
Function = Callable[..., Any]
SHARDED: Any = None
MEMBERS: list[Any] = []
NAMED: dict[str, Any] = {}


class Network(nn.Cell):
    """``parallelize_module`` cuts its layers; ``held`` is a DTensor."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(6, 8), nn.Dense(8, 6)
        self.held, self.list = held, [held]
        for k, parameter in enumerate(self.get_parameters()):
            shape = parameter.shape
            parameter.set_data(Tensor(np.random.default_rng(k).standard_normal(shape).astype(np.float32)))

    def construct(self, x: Any) -> Any:
        return self.down(ops.relu(self.up(x)))


class Holder(nn.Cell):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def construct(self, x: Any) -> Any:
        return (self.held * 2.0).sum() + x.sum()


def reaching() -> dict[str, Function]:
    """One function for each way to a DTensor that exists before."""
    global SHARDED
    mesh = mesh_of((get_platform().world_size(),))
    SHARDED = captured = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    MEMBERS[:], NAMED["a"] = [SHARDED], SHARDED
    holder = Holder(SHARDED)

    class Plain:
        held, list = SHARDED, [SHARDED]

    plain = Plain()

    def from_global(x: Any) -> Any:
        return (SHARDED * 2.0).sum() + x.sum()

    def from_closure(x: Any) -> Any:
        return (captured * 2.0).sum() + x.sum()

    def from_list(x: Any) -> Any:
        return (MEMBERS[0] * 2.0).sum() + x.sum()

    def from_dict(x: Any) -> Any:
        return (NAMED["a"] * 2.0).sum() + x.sum()

    def from_attribute(x: Any) -> Any:
        return (plain.held * 2.0).sum() + x.sum()

    def from_list_attribute(x: Any) -> Any:
        return (plain.list[0] * 2.0).sum() + x.sum()

    def from_cell(x: Any) -> Any:
        return holder(x) * 1.0

    def from_default(x: Any, y: Any = SHARDED) -> Any:
        return (y * 2.0).sum() + x.sum()

    def in_loop(x: Any) -> Any:
        total = x.sum()
        for y in MEMBERS:
            total = total + (y * 2.0).sum()
        return total

    def in_operators(x: Any) -> Any:
        return ops.stack([SHARDED, SHARDED]).sum() + x.sum() * SHARDED.shape[0]

    functions = (from_global, from_closure, from_list, from_dict, from_attribute, from_list_attribute, from_cell,
                 from_default, in_loop, in_operators)  # fmt: skip
    return {function.__name__: function for function in functions}


def making() -> dict[str, Function]:
    """One function for each way to make one inside."""
    mesh = mesh_of((get_platform().world_size(),))
    whole, cut = Network(None), Network(None)
    parallelize_module(whole, mesh, {"up": "colwise", "down": "rowwise"})
    parallelize_module(cut, mesh, {"up": "colwise_loss_parallel"})

    def from_local(x: Any) -> Any:
        y = DTensor.from_local(x * 2.0, mesh, [Shard(0)])
        return (y + 1.0).sum()

    def redistributed(x: Any) -> Any:
        y = distribute_tensor(x, mesh, [Shard(0)])
        return (y + 1.0).sum().full_tensor() + y.redistribute(mesh, [Shard(1)]).sum().full_tensor()

    def model(x: Any) -> Any:
        return whole(x).sum()

    def loss(x: Any) -> Any:
        with loss_parallel():
            return ops.cross_entropy(cut.up(x), Tensor(LABELS))

    def region(x: Any) -> Any:
        return reduce_from_tp_region(x * 2.0, mesh) + 1.0

    return {function.__name__: function for function in (from_local, redistributed, model, loss, region)}


def plain(x: Any) -> Any:
    return x.asnumpy() if type(x) is Tensor else x.full_tensor().asnumpy()


def bytecode() -> None:
    """Whatever it reaches or makes: the values of the uncompiled function, on the second call, too."""
    if sys.version_info >= (3, 12):  # MindSpore's own limit
        return
    x = Tensor(X)
    for name, function in {**reaching(), **making()}.items():
        expected = plain(function(x))
        compiled = mindspore.jit(function, capture_mode="bytecode")
        for _ in range(2):
            assert np.array_equal(plain(compiled(x)), expected), name
    holder = Holder(SHARDED)
    cell = mindspore.jit(holder, capture_mode="bytecode")
    assert np.array_equal(plain(cell(x)), plain(holder(x)))
    network = Network(None)
    of_one = plain(network(x))
    function = mindspore.jit(lambda x: network(x) + 0.0, capture_mode="bytecode")
    assert np.allclose(plain(function(x)), of_one, rtol=1e-5)
    parallelize_module(network, mesh_of((get_platform().world_size(),)), {"up": "colwise", "down": "rowwise"})
    assert np.allclose(plain(function(x)), of_one, rtol=1e-4, atol=1e-5)
    shared = mindspore.jit(network.up, capture_mode="bytecode")
    assert np.array_equal(plain(shared(x)), plain(network.up(x)))


def bytecode_afterwards() -> None:
    """A graph that was made from a plain tensor, then given a DTensor of the same local shape; and empty tensors."""
    if sys.version_info >= (3, 12):
        return
    mesh = mesh_of((get_platform().world_size(),))
    sharded = distribute_tensor(Tensor(X), mesh, [Shard(0)])
    local = sharded.to_local()
    captured = local

    def closing(x: Any) -> Any:
        return (captured * 2.0).sum() + x.sum()

    values = [local]

    def given(x: Any) -> Any:
        sys.stdout.flush()  # ends a graph; else MindSpore takes values[0] for a constant, be it a DTensor or not
        return values[0]

    def returned(x: Any) -> Any:
        y = given(x)
        return (y * 2.0).sum() + x.sum()

    for function in (closing, returned):
        compiled = mindspore.jit(function, capture_mode="bytecode")
        for captured in (local, sharded, local, sharded):
            values[0] = captured
            assert np.array_equal(plain(compiled(Tensor(X))), plain(function(Tensor(X)))), function.__name__
    for shape in ((0, 6), (1, 6), ()):
        small = DTensor.from_local(Tensor(np.ones(shape, np.float32)), mesh, [Replicate()])

        def summing(x: Any, small: Any = small) -> Any:
            return (small * 2.0).sum() + x.sum()

        found = mindspore.jit(summing, capture_mode="bytecode")(Tensor(X))
        assert isinstance(found, DTensor) and found.item() == summing(Tensor(X)).item(), shape


def bytecode_by_name() -> None:
    """The functions called by name, on plain tensors: values and gradients of the uncompiled ones, inside a graph."""
    if sys.version_info >= (3, 12):
        return
    group, head = mesh_of((get_platform().world_size(),)), Tensor(np.linspace(-1.0, 1.0, 36, dtype=np.float32))
    labels, head = Tensor(LABELS), head.reshape(6, 6)
    x = Tensor(X[: len(LABELS), :6])

    def loss(x: Any) -> Any:
        return vocab_parallel_cross_entropy(x * 2.0, labels, group, label_smoothing=0.1) * 3.0

    def more(x: Any) -> Any:
        value, log_probs, entropy = vocab_parallel_cross_entropy(
            x * 2.0, labels, group, num_classes=12, return_log_probs=True, return_entropy=True
        )
        return value + log_probs.sum() + entropy.sum()

    def linear(x: Any) -> Any:
        return linear_cross_entropy(x * 2.0, head, labels, group, reduction="sum") * 3.0

    def largest(x: Any) -> Any:
        values, _ = vocab_parallel_topk(x * 2.0, 2, group)
        return values.sum() + vocab_parallel_argmax(x * 2.0, group).sum()

    for function in (loss, more, linear, largest):
        compiled = mindspore.jit(function, capture_mode="bytecode")
        for _ in range(2):
            assert np.array_equal(plain(compiled(x)), plain(function(x))), function.__name__
            if function is not largest:
                found, expected = (mindspore.value_and_grad(f)(x)[1] for f in (compiled, function))
                assert np.array_equal(plain(found), plain(expected)), function.__name__


def another_version() -> None:
    """Where nobody knows what the capture asks, all its calls are refused, and say so."""
    ordinary = pijit_context.PreJit
    compiled = mindspore.jit(lambda x: x + 1.0, capture_mode="bytecode")
    try:
        pijit_context.PreJit = lambda args, kwargs: None
        refuse_arguments(TensorBase, "2.11.0")
        if sys.version_info < (3, 12):
            refused(lambda: compiled(Tensor(X)), "MindSpore 2.11.0", "expected MindSpore 2.10")
    finally:
        pijit_context.PreJit = ordinary


def ast() -> None:
    """Refused, on the second call, too; cells in graph mode likewise."""
    x = Tensor(X)
    for function in reaching().values():
        compiled = mindspore.jit(function)
        for _ in range(2):
            refused(lambda: compiled(x), "graph mode")  # noqa: B023
    for name, function in making().items():
        compiled = mindspore.jit(function)
        for _ in range(2):
            if name == "model":
                refused(lambda: compiled(x), "shared between ranks", "graph mode")  # noqa: B023
            else:
                refused(lambda: compiled(x), "graph mode")  # noqa: B023
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        holder = Holder(SHARDED)
        for _ in range(2):
            refused(lambda: holder(x), "graph mode")
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def trace() -> None:
    """Refused; afterwards PyNative mode and other traced functions are as before."""
    x = Tensor(X)
    ordinary = jit_trace._get_caller_lines
    jit_trace._get_caller_lines = lambda: (["here"], [1])  # the workers' own frames have no source, which it requires

    try:
        doubled = mindspore.jit(lambda x: (x * 2.0).sum(), capture_mode="trace")
        functions = {**reaching(), **making()}
        for function in functions.values():
            compiled = mindspore.jit(function, capture_mode="trace")
            for _ in range(2):
                refused(lambda: compiled(x), "graph mode")  # noqa: B023
                assert (SHARDED * 1.0).sum().item() == X.sum()
        compiled = mindspore.jit(lambda x, y: x + y[0]["a"], capture_mode="trace")
        refused(lambda: compiled(x, [{"a": SHARDED}]), "graph mode")
        for _ in range(2):
            assert float(doubled(x)) == 2 * X.sum()
    finally:
        jit_trace._get_caller_lines = ordinary
