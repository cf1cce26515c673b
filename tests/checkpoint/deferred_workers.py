"""What runs in MindSpore workers: parameters without memory."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import HeNormal, HeUniform, Initializer, XavierNormal, XavierUniform, initializer

from hyper_parallel.platform.mindspore.deferred import (
    deferred_parameter,
    deferred_parameters,
    is_deferred,
    is_deferring,
)
from hyper_parallel.platform.mindspore.init_recorder import describe_initializer
from hyper_parallel.platform.mindspore.weights import create_weight_backend, fill
from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint
from hyper_parallel.tensor_parallel.initialize import Normal
from hyper_parallel.tensor_parallel.materialize import materialize
from tests.checkpoint.test_memory import peak_over_idle


class Mixed(nn.Cell):
    """Parameters made in all the ways there are, and what is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(8, 4)
        self.norm = nn.LayerNorm((8,))
        self.running = nn.BatchNorm1d(4)
        self.ones = Parameter(Tensor(np.ones(5), mindspore.float32))
        self.half = Parameter(Tensor(np.full((2, 2), 0.1), mindspore.bfloat16))
        self.steps = Parameter(Tensor(np.arange(3), mindspore.float32))
        self.count = Parameter(Tensor(np.zeros(1), mindspore.int64), requires_grad=False)
        self.padded = mint.nn.Embedding(10, 4, padding_idx=3)
        self.older = nn.Embedding(10, 4, padding_idx=0)
        self.early = Parameter(initializer("normal", (6, 2)).init_data())
        self.table = Tensor(np.cos(np.arange(4)), mindspore.float32)
        self.register_buffer("mask", Tensor(np.tril(np.ones((3, 3))), mindspore.float32), persistent=False)


def build_and_draw() -> dict[str, Any]:
    with deferred_parameters():
        model = Mixed()
    deferred = sorted(name for name, p in model.parameters_and_names() if is_deferred(p))
    objects = dict(model.parameters_and_names())
    materialize(model, seed=3)
    assert all(p is objects[name] and not is_deferred(p) for name, p in model.parameters_and_names())
    values = {name: p.astype(mindspore.float32).asnumpy().copy() for name, p in model.parameters_and_names()}
    return {
        "deferred": deferred,
        "values": values,
        "beside": (model.table.asnumpy().copy(), model.mask.asnumpy().copy()),
        "forward": model.dense(Tensor(np.ones((1, 8)), mindspore.float32)).asnumpy(),
    }


def scope() -> list[bool]:
    """Inside and outside: this thread, another one, after an error, nested."""
    found = [is_deferred(Parameter(initializer("ones", (2,))))]
    other: list[bool] = []

    def elsewhere() -> None:
        other.append(is_deferred(Parameter(initializer("ones", (2,)))) or is_deferring())

    before = Parameter.__new__, Tensor.init_data
    with deferred_parameters():
        with deferred_parameters():
            found.append(is_deferred(Parameter(initializer("ones", (2,)))))
        found.append(is_deferred(Parameter(initializer("ones", (2,)))))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    try:
        with deferred_parameters():
            raise KeyError
    except KeyError:
        pass
    found += [*other, is_deferred(Parameter(initializer("ones", (2,)))), is_deferring()]
    return [*found, (Parameter.__new__, Tensor.init_data) == before]


def no_memory(width: int) -> tuple[int, int]:
    """Bytes that building takes, and what the parameters would take."""

    def build() -> Any:
        with deferred_parameters():
            return nn.SequentialCell(*[nn.Dense(width, width, has_bias=False) for _ in range(8)])

    build()
    peak, _, model = peak_over_idle(build)
    return peak, sum(p.size * p.itemsize for p in model.get_parameters())


def distributions() -> dict[str, tuple[Any, float, float]]:
    """What is said of each initializer, beside the spread of what it draws."""
    kinds: dict[str, Initializer] = {
        "he uniform": HeUniform(math.sqrt(5)),
        "he normal, out": HeNormal(mode="fan_out", nonlinearity="relu"),
        "he normal, tanh": HeNormal(nonlinearity="tanh"),
        "xavier normal": XavierNormal(2),
        "xavier uniform": XavierUniform(),
    }
    found = {}
    for name, kind in kinds.items():
        for shape in ((300, 200), (20, 30, 10, 10)):
            draw = describe_initializer(kind, shape)
            drawn = initializer(kind, shape).init_data().asnumpy()
            found[f"{name} {shape}"] = (draw, float(drawn.std()), float(np.abs(drawn).max()))
    return found


def bits(dtype: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """float32 values through a parameter of another dtype: as they are read back, and their bytes."""
    parameter = deferred_parameter(values.shape, getattr(mindspore, dtype))
    backend = create_weight_backend()
    backend.allocate([], parameter, "cpu")
    fill(parameter, values)
    raw = np.array(backend.reader(parameter).read(0, parameter.size * parameter.itemsize))
    return parameter.astype(mindspore.float32).asnumpy().copy(), raw, str(parameter.dtype)


def strided(dtype: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Filled and read where the elements lie in another order in memory."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    parameter = Parameter(Tensor(np.zeros((4, 3)), getattr(mindspore, dtype)))
    parameter.assign_value(parameter.swapaxes(0, 1))
    before = parameter.is_contiguous()
    fill(parameter, values)
    raw = np.array(create_weight_backend().reader(parameter).read(0, parameter.size * parameter.itemsize))
    return parameter.astype(mindspore.float32).asnumpy().copy(), raw, before


def copies_and_moves() -> dict[str, Any]:
    with deferred_parameters():
        model = nn.Dense(4, 4)
        twin = copy.deepcopy(model)
    model.to(dtype=mindspore.bfloat16)
    materialize(model, seed=1)
    materialize(twin, seed=1)
    return {
        "dtype": str(model.weight.dtype),
        "twin": twin.weight.asnumpy().copy(),
        "same": np.abs(model.weight.astype(mindspore.float32).asnumpy() - twin.weight.asnumpy()).max(),
    }


def meta_device() -> Any:
    """A model that its user has built on MindSpore's meta device: parameters are known, other tensors are not."""
    with mindspore.DeviceCtx("meta"):
        known = nn.Dense(4, 4)
    materialize(known, seed=1)
    assert known(Tensor(np.ones((1, 4)), mindspore.float32)).shape == (1, 4)
    with deferred_parameters():
        twin = nn.Dense(4, 4)
    materialize(twin, seed=1)
    assert np.array_equal(known.weight.asnumpy(), twin.weight.asnumpy())
    return True


class Frequencies(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (3,)))
        self.register_buffer("inv_freq", Tensor(np.ones(4), mindspore.float32), persistent=False)


def buffer_on_meta(path: str | None) -> None:
    with mindspore.DeviceCtx("meta"):
        model = Frequencies()
    if path is None:
        materialize(model)
    else:
        load_hf_checkpoint(model, path)


def unset_parameters_in_use() -> list[str]:
    """What is said when somebody computes with parameters that have no values, in one way or another."""
    with deferred_parameters():
        model = nn.SequentialCell(nn.Dense(4, 6), nn.LayerNorm((6,)), nn.Embedding(6, 6))
    x, wide = Tensor(np.ones((1, 4)), mindspore.float32), Tensor(np.ones((1, 6)), mindspore.float32)
    first, norm, table = (cell.trainable_params()[0] for cell in model)
    model.to(dtype=mindspore.float16)
    model.to(dtype=mindspore.float32)
    said = []
    for use in (
        lambda: model(x),
        lambda: mindspore.value_and_grad(lambda x: model[0](x).sum(), None, [first])(x),
        lambda: model[1](wide),
        lambda: model[2](Tensor([1])),
        lambda: wide * norm,
        lambda: wide @ table,
        lambda: norm.astype(mindspore.float16) + 1,
        lambda: norm[0],
        lambda: norm.asnumpy(),
        lambda: copy.deepcopy(model)(x),
    ):
        try:
            use()
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append("no error")
    # values that came by a way of MindSpore's own are values
    mindspore.load_param_into_net(model, {p.name: Parameter(ops.ones(p.shape), name=p.name) for p in (first, norm)})
    np.testing.assert_array_equal((wide * norm).asnumpy(), np.ones((1, 6)))
    np.testing.assert_array_equal(ops.matmul(x, first.T).asnumpy(), np.full((1, 6), 4))
    materialize(model, seed=1)
    assert {type(p) for p in model.get_parameters()} == {type(Parameter(x))}
    return said


def with_persistent_buffer(path: str) -> list[float]:
    """A persistent buffer is loaded; it may have no memory."""

    class Mean(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(initializer("ones", (3,)))
            self.register_buffer("mean", Tensor(np.zeros(3), mindspore.float32))

    found: list[float] = []
    for context in (deferred_parameters(), mindspore.DeviceCtx("meta")):
        with context:
            model = Mean()
        load_hf_checkpoint(model, path)
        found += model.mean.asnumpy().tolist() + model.weight.asnumpy().tolist()
    return found


def given_distribution() -> float:
    with deferred_parameters():
        model = nn.Dense(64, 64, weight_init="orthogonal")
    materialize(model, seed=0, initial={"weight": Normal(2.0)})
    return float(model.weight.asnumpy().std())
