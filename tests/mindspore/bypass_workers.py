"""In the workers: whatever MindSpore answers without asking the dispatcher is global, or refused; never local."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import DTensor, Replicate, Shard, SkipDTensorDispatch, UnsupportedOperatorError, distribute_tensor
from hyper_parallel.platform import get_platform
from tests.mindspore.op_checks import mesh_of

X = np.arange(24, dtype=np.float32).reshape(4, 6)


def tensors() -> tuple[DTensor, DTensor, Tensor]:
    """Sharded, replicated, plain."""
    mesh = mesh_of((get_platform().world_size(),))
    plain = Tensor(X)
    return distribute_tensor(plain, mesh, [Shard(0)]), distribute_tensor(plain, mesh, [Replicate()]), plain


def refused(function: Callable[[], Any], *says: str, error: type[Exception] = UnsupportedOperatorError) -> None:
    try:
        result = function()
    except error as e:
        assert all(text in str(e) for text in says), str(e)
    else:
        raise AssertionError(f"not refused: {result!r}")


def metadata() -> None:
    sharded, _, _ = tensors()
    assert (sharded.shape, sharded.ndim, sharded.size, len(sharded), sharded.nbytes) == ((4, 6), 2, 24, 4, 96)
    assert (sharded.dim(), sharded.ndimension(), sharded.numel(), sharded.nelement()) == (2, 2, 24, 24)
    assert (ops.shape(sharded), ops.rank(sharded), ops.size(sharded)) == ((4, 6), 2, 24)
    assert sharded.dtype == mindspore.float32 and sharded.is_floating_point() and ops.is_tensor(sharded)
    assert ops.full_like(sharded, 2.0).shape == (4, 6)
    assert sharded.contiguous().shape == (+sharded).shape == sharded.value().shape == sharded.data.shape == (4, 6)
    assert copy.copy(sharded).shape == copy.deepcopy(sharded).shape == (4, 6)
    assert sharded.type_as(sharded).shape == (4, 6)
    assert (sharded == None) is False and len({sharded, sharded}) == 1  # noqa: E711


def host_values() -> None:
    sharded, replicated, _ = tensors()
    for function in (
        lambda: sharded.asnumpy(),
        lambda: sharded.numpy(),
        lambda: sharded.tolist(),
        lambda: np.asarray(sharded),
        lambda: sharded.item(),
        lambda: bool(sharded),
    ):
        refused(function, "no rank holds the values", "full_tensor()")
    assert np.array_equal(replicated.asnumpy(), X) and np.array_equal(np.asarray(replicated), X)
    total = sharded.sum()
    assert total.item() == float(total) == int(total) == total.asnumpy() == 276.0
    assert bool(total > 0) and f"{total:.1f}" == "276.0"
    assert "DTensor" in f"{sharded}" and "S(0)" in str(sharded)


def refusals() -> None:
    sharded, _, plain = tensors()
    for name, call in {
        "__setitem__": lambda: sharded.__setitem__(0, 1.0),
        "__contains__": lambda: 1.0 in sharded,
        "strides": lambda: sharded.strides,
        "stride": lambda: sharded.stride(),
        "get_bytes": lambda: sharded.get_bytes(),
        "to_dlpack": lambda: sharded.to_dlpack(),
        "assign_value": lambda: sharded.assign_value(plain),
        "set_dtype": lambda: sharded.set_dtype(mindspore.float16),
        "fill": lambda: sharded.fill(1),
        "resize": lambda: sharded.resize(2, 2),
        "isreal": lambda: sharded.isreal(),
        "storage": lambda: sharded.storage(),
    }.items():
        refused(call, f"Tensor.{name}")
    for call in (
        lambda: sharded.add_(1.0),
        lambda: sharded.exp_(),
        lambda: sharded.copy_(sharded),
        lambda: sharded.mul_(sharded),
        lambda: sharded.zero_(),
    ):
        refused(call, "a DTensor is not written to")
    refused(lambda: plain.__setitem__(0, sharded), "written into a plain tensor")
    refused(lambda: plain.__setitem__((0, sharded), 1.0), "written into a plain tensor")
    refused(lambda: Tensor(sharded), "local values alone")
    refused(lambda: mindspore.tensor(sharded), "local values alone")
    refused(lambda: Parameter(sharded, name="p"), "from_local", error=TypeError)
    refused(lambda: DTensor(plain), "from_local", error=TypeError)


def rebinding() -> None:
    """``x += y`` gives a new DTensor; other names keep the old one."""
    sharded, _, _ = tensors()
    other = sharded
    sharded += 1.0
    sharded *= 2.0
    sharded -= sharded / 2
    sharded /= 0.5
    assert np.array_equal(sharded.full_tensor().asnumpy(), (X + 1) * 2)
    assert np.array_equal(other.full_tensor().asnumpy(), X)


def plain_on_the_left() -> None:
    _, replicated, plain = tensors()
    positive = plain + 1.0
    for function in (
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a / b,
        lambda a, b: a // b,
        lambda a, b: a % b,
        lambda a, b: a < b,
        lambda a, b: a == b,
    ):
        found = function(plain, replicated + 1.0)
        assert isinstance(found, DTensor)
        assert np.allclose(found.asnumpy(), function(plain, positive).asnumpy())


def lists_and_indices() -> None:
    sharded, replicated, plain = tensors()
    assert np.array_equal(ops.stack([sharded, sharded]).full_tensor().asnumpy(), np.stack([X, X]))
    assert np.array_equal(ops.addn([sharded, sharded]).full_tensor().asnumpy(), X + X)
    mesh = mesh_of((get_platform().world_size(),))
    index = distribute_tensor(Tensor(np.array([0, 3, 1, 2], np.int32)), mesh, [Shard(0)])
    assert np.array_equal(plain[:, index].full_tensor().asnumpy(), X[:, [0, 3, 1, 2]])
    assert np.array_equal(plain[index].full_tensor().asnumpy(), X[[0, 3, 1, 2]])
    assert np.array_equal(sharded[:, 1].full_tensor().asnumpy(), X[:, 1])
    refused(lambda: sharded[0], "must be whole")
    refused(lambda: list(sharded), "must be whole")
    assert np.array_equal(np.stack([row.asnumpy() for row in replicated]), X)


def skipped() -> None:
    """Inside SkipDTensorDispatch operators see local tensors and give local ones."""
    sharded, _, _ = tensors()
    with SkipDTensorDispatch():
        local = sharded + 1.0
    assert type(local) is Tensor and local.shape == sharded.global_layout.local_shape


@mindspore.jit
def compiled(x: Any) -> Any:
    return x + 1.0


@mindspore.jit
def compiled_list(x: Any, others: Any) -> Any:
    return x + others[0]


class Compiled(nn.Cell):
    def __init__(self, captured: Any = None) -> None:
        super().__init__()
        self.captured = captured

    @mindspore.jit
    def construct(self, x: Any) -> Any:
        return x + self.captured


@mindspore.jit(capture_mode="bytecode")
def from_bytecode(x: Any, others: Any = ()) -> Any:
    return (x + 1.0).sum()


class Network(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x * 2.0


def graph_mode() -> None:
    """Arguments, lists, captured tensors, and graph mode: refused; plain tensors go on as before."""
    sharded, _, plain = tensors()

    @mindspore.jit
    def capturing(x: Any) -> Any:
        return x + sharded

    for function in (
        lambda: compiled(sharded),
        lambda: compiled(x=sharded),
        lambda: compiled_list(plain, [sharded]),
        lambda: compiled_list(plain, (sharded,)),
        lambda: capturing(plain),
        lambda: Compiled(sharded)(plain),
    ):
        refused(function, "graph mode")
    if sys.version_info < (3, 12):  # MindSpore's own limit
        for function in (
            lambda: from_bytecode(sharded),
            lambda: from_bytecode(x=sharded),
            lambda: from_bytecode(plain, [{"a": sharded}]),
        ):
            refused(function, "graph mode")
        assert np.allclose(from_bytecode(plain).asnumpy(), (X + 1).sum())
    assert np.array_equal(compiled(plain).asnumpy(), X + 1)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        refused(lambda: Network()(sharded), "graph mode")
        assert np.array_equal(Network()(plain).asnumpy(), X * 2)
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def random() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Masks of dropout: of a replicated tensor, of a sharded one, of the next call, and after seeding again."""
    mesh = mesh_of((get_platform().world_size(),))
    ones = Tensor(np.ones((8, 16), np.float32))
    replicated, sharded = (distribute_tensor(ones, mesh, [p]) for p in (Replicate(), Shard(0)))
    get_platform().set_seed(5)
    first = ops.dropout(replicated, 0.5).to_local().asnumpy()
    second = ops.dropout(sharded, 0.5).full_tensor().asnumpy()
    third = nn.Dropout(p=0.5).set_train()(replicated).to_local().asnumpy()
    get_platform().set_seed(5)
    again = ops.dropout(replicated, 0.5).to_local().asnumpy()
    assert np.array_equal(first, again)
    before = mindspore.get_rng_state().asnumpy()
    with get_platform().seeded(1):
        drawn = get_platform().draw_seed()
    assert np.array_equal(mindspore.get_rng_state().asnumpy(), before) and 0 <= drawn < 2**62
    assert get_platform().peek_seed() == get_platform().draw_seed() != get_platform().peek_seed()
    return first, second, third, again


def mint_dropout_without_training() -> None:
    sharded, _, _ = tensors()
    assert np.array_equal(mint.nn.functional.dropout(sharded, 0.5, training=False).full_tensor().asnumpy(), X)


def table_names() -> tuple[list[str], list[str]]:
    """Names of the operator tables, and those of MindSpore's primitives."""
    from mindspore.ops import operations
    from mindspore.ops.auto_generate import gen_ops_prim

    from hyper_parallel.core.shard.parallel_ops_register import registered_ops

    primitives = {
        name for module in (operations, gen_ops_prim) for name, x in vars(module).items() if isinstance(x, type)
    }
    return sorted(registered_ops("mindspore")), sorted(primitives)
