"""In the workers: collectives against NumPy, on the emulated and on the native route."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common import np_dtype

from hyper_parallel import get_platform
from hyper_parallel.platform import Group
from hyper_parallel.platform.mindspore import _communicator, collectives, shared_linear
from hyper_parallel.platform.mindspore import _emulated_collectives as emulated
from hyper_parallel.platform.mindspore import _native_collectives as native
from hyper_parallel.platform.mindspore._host import to_bits
from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear
from tests.mindspore.op_checks import mesh_of

DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")


def native_group(group: Group) -> Group:
    """The group with stand-ins for the operators of an accelerator; they run the emulation and count the calls."""
    return Group(group.ranks, StandIn(group), group.rank)


class StandIn:
    """What ``Group.handle`` is on an accelerator."""

    native = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self.calls: list[str] = []

    def start_all_reduce(self, x: Tensor, op: str) -> Any:
        """The result comes with the wait, as nothing may be read before it."""
        total = emulated.all_reduce(x, op, self._group)
        return self._pending("AllReduce", x, total)

    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self._pending("AllGather", out, emulated.all_gather(x, self._group).reshape(-1))

    def _pending(self, kind: str, out: Tensor, result: Tensor) -> Any:
        self.calls.append(f"start {kind}")

        def wait() -> None:
            self.calls.append(f"wait {kind}")
            out.assign_value(result)

        return Mock(wait=wait)

    def operator(self, kind: str, *arguments: Any) -> Any:
        group = self._group

        def all_reduce(x: Tensor) -> Tensor:
            return emulated.all_reduce(x, arguments[0], group)

        def all_gather(x: Tensor) -> Tensor:
            gathered = emulated.all_gather(x, group)
            return gathered.reshape((-1, *x.shape[1:]))  # along the first dim, as the operator does

        def reduce_scatter(x: Tensor) -> Tensor:
            part = x.shape[0] // group.size
            return emulated.reduce_scatter_uneven(x, 0, [part] * group.size, group)

        def all_to_all(x: Tensor, send: list[int], receive: list[int]) -> Tensor:
            pieces, start = [], 0
            for size in send:
                pieces.append(collectives.copy(Tensor(x.asnumpy()[start : start + size])))
                start += size
            got = emulated.all_to_all_uneven(pieces, [(size,) for size in receive], group)
            return Tensor(np.concatenate([g.asnumpy() for g in got]))

        def broadcast(inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (emulated.broadcast(inputs[0], group.ranks.index(arguments[0]), group),)

        run = {
            "AllReduce": all_reduce,
            "AllGather": all_gather,
            "ReduceScatter": reduce_scatter,
            "AlltoAllV": all_to_all,
            "Broadcast": broadcast,
        }[kind]

        def counted(*args: Any) -> Any:
            self.calls.append(kind)
            return run(*args)

        return counted


def values(dtype: str, rank: int) -> np.ndarray:
    rng = np.random.default_rng(rank)
    if dtype == "bool":
        return rng.random((3, 4)) < 0.5
    if dtype in ("float32", "float64", "float16", "bfloat16"):
        array = rng.standard_normal((3, 4))
        return array.astype(np_dtype.bfloat16 if dtype == "bfloat16" else dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, (3, 4), dtype=dtype, endpoint=True)


def bits_equal(found: Tensor, expected: np.ndarray) -> bool:
    """Shape and every bit, but for the sign of zero."""
    if expected.dtype == np_dtype.bfloat16:
        expected = expected.view(np.uint16)
    got = to_bits(found)
    return got.shape == expected.shape and got.dtype == expected.dtype and np.array_equal(got, expected)


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np_dtype.bfloat16 else array


def check(dtype: str, native: bool, mesh_shape: tuple[int, ...]) -> list[str]:
    """Every collective along every mesh dim; the operators that ran on the native route."""
    platform = get_platform()
    mesh = mesh_of(mesh_shape)
    calls: list[str] = []
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if native and group.size > 1:
            group = native_group(group)
        check_group(dtype, group, platform.rank())
        calls += getattr(group.handle, "calls", [])
    return calls


def check_group(dtype: str, group: Group, rank: int) -> None:
    arrays = [values(dtype, r) for r in group.ranks]
    mine = arrays[group.rank]
    x = Tensor(mine)
    stacked = np.stack([wide(a) for a in arrays])

    assert bits_equal(collectives.all_gather(x, group), np.stack(arrays))
    for source in range(group.size):
        assert bits_equal(collectives.broadcast(x, source, group), arrays[source])
    for op, reduce in (("max", np.max), ("min", np.min)):
        assert bits_equal(collectives.all_reduce(x, op, group), reduce(stacked, 0).astype(mine.dtype))
    check_sum(collectives.all_reduce(x, "sum", group), stacked, mine.dtype)

    sizes = [3, 1, 0, 2][: group.size]
    pieces = [a[:size] for a, size in zip(arrays, sizes)]
    own = Tensor(np.array(pieces[group.rank]))
    whole = np.concatenate([to_bits(Tensor(np.array(p))) for p in pieces])
    gathered = collectives.all_gather_uneven(own, 0, sizes, group)
    assert np.array_equal(to_bits(gathered), whole)

    cut = [4, 0, 0, 0][: group.size]
    scattered = collectives.reduce_scatter_uneven(x, 1, cut, group)
    assert tuple(scattered.shape) == (3, cut[group.rank])
    if cut[group.rank]:
        check_sum(scattered, stacked, mine.dtype)

    def sent(a: int, b: int) -> np.ndarray:
        return np.array(arrays[a][: (a + 2 * b) % 4])

    chunks = [Tensor(sent(group.rank, to)) for to in range(group.size)]
    shapes = [sent(source, group.rank).shape for source in range(group.size)]
    for source, got in enumerate(collectives.all_to_all_uneven(chunks, shapes, group)):
        assert bits_equal(got, sent(source, group.rank)), (source, rank)
    assert bits_equal(x, mine), "the input was changed"


def check_sum(found: Tensor, stacked: np.ndarray, dtype: np.dtype) -> None:
    """Integers wrap around; 16-bit floats are rounded once; truth values are or-ed."""
    if dtype == np.bool_:
        assert bits_equal(found, stacked.any(0))
    elif dtype.kind in "iu":
        assert bits_equal(found, stacked.sum(0, dtype=dtype))
    else:
        exact = stacked.astype(np.float64).sum(0)
        half_ulp = {2: 2.0**-8 if dtype.kind == "V" else 2.0**-11, 4: 4 * 2.0**-24, 8: 4 * 2.0**-53}[dtype.itemsize]
        bound = half_ulp * np.maximum(np.abs(exact), np.abs(stacked).max(0)) + 1e-30
        assert (np.abs(wide(found.asnumpy()).astype(np.float64) - exact) <= bound).all()


def extreme_values() -> None:
    """Infinities, NaN and denormals travel; a gradient is never recorded."""
    group = mesh_of((get_platform().world_size(),)).get_group()
    odd = np.array([np.inf, -np.inf, np.nan, 1e-42, 3.4e38], np.float32)
    gathered = collectives.all_gather(Tensor(odd), group).asnumpy()
    assert np.array_equal(gathered, np.stack([odd] * group.size), equal_nan=True)


def column_layer() -> tuple[ColumnParallelLinear, np.ndarray, tuple[slice, ...]]:
    """A layer, its whole weight, and what this rank holds of that."""
    layer = ColumnParallelLinear(6, 5, group=mesh_of((get_platform().world_size(),)))
    weight = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
    part = layer.rule.cuts["weight"].slices(layer.group.rank)[0]
    layer.weight.set_data(Tensor(weight[part]))
    layer.bias.set_data(ops.zeros_like(layer.bias))
    return layer, weight, part


def second_derivative() -> float:
    """Of ``sum(d sum(y^2) / dx)^2`` with ``y = x W^T``, which is ``8 x (W^T W)^2``: the worst relative error."""
    layer, weight, _ = column_layer()
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    first = mindspore.grad(lambda x: ops.sum(layer(x) ** 2))
    found = mindspore.grad(lambda x: ops.sum(first(x) ** 2))(Tensor(x)).asnumpy()
    square = weight.T.astype(np.float64) @ weight
    right = 8 * x @ square @ square
    return float(np.abs(found - right).max() / np.abs(right).max())


def order_of_backward() -> tuple[list[str], float]:
    """A column-parallel layer on the native route, by MindSpore's own asynchronous sum, which its CPU backend has too.

    What backward does, in order, and how far the gradients are from the right ones.
    """
    layer, weight, part = column_layer()
    rng = np.random.default_rng(0)
    x, upstream = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 6), (2, 3, 5)))
    own = Tensor(np.ascontiguousarray(upstream[..., part[0]]))
    events: list[str] = []

    def noted(event: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            result = function(*args, **kwargs)
            return Mock(wait=noted("wait", result.wait)) if event == "start" else result

        return run

    def loss(x: Tensor) -> Tensor:
        return ops.sum(layer(x) * own)

    with (
        patch.object(layer.group.handle, "native", True),
        patch.object(_communicator, "all_reduce", noted("start", _communicator.all_reduce)),
        patch.object(shared_linear, "_of_weight", noted("weight", shared_linear._of_weight)),
    ):
        of_x, of_parameters = mindspore.value_and_grad(loss, 0, [layer.weight, layer.bias])(Tensor(x))[1]
    flat = upstream.reshape(-1, 5)
    right = (upstream @ weight, (flat.T @ x.reshape(-1, 6))[part], flat.sum(0)[part[0]])
    found = (of_x, *of_parameters)
    return events, max(float(np.abs(f.asnumpy() - r).max()) for f, r in zip(found, right, strict=True))


def started() -> list[list[float]]:
    """A gather by MindSpore's asynchronous one, whose CPU backend has none: by a stand-in of the same signature."""
    group = mesh_of((get_platform().world_size(),)).get_group()
    x = Tensor(np.array([group.rank, 0.5], np.float32))

    def stand_in(out: Tensor, x: Tensor, group_name: str, async_op: bool) -> Any:
        assert group_name == group.handle.name and async_op
        gathered = emulated.all_gather(x, group).reshape(-1)
        return Mock(wait=lambda: out.assign_value(gathered))

    with patch.object(_communicator, "all_gather_into_tensor", autospec=True, side_effect=stand_in):
        found: list[list[float]] = native.start_all_gather(x, group)().asnumpy().tolist()
    return found


def creation() -> tuple[list[int], list[int]]:
    """Groups are made by members only, and a group of one needs none."""
    platform = get_platform()
    rows = platform.create_group([(0, 1), (2, 3)])
    again = platform.create_group([(0, 1), (2, 3)])
    assert rows.handle is again.handle, "MindSpore refuses to create a group twice"
    alone = platform.create_group([(0,), (1,), (2,), (3,)])
    assert alone.handle is None and alone.size == 1
    adopted = platform.adopt_group(rows.handle.name)
    assert adopted.ranks == rows.ranks and adopted.rank == rows.rank
    total = platform.all_reduce(Tensor(np.array([1.0 + platform.rank()], np.float32)), "sum", adopted)
    return list(rows.ranks), total.asnumpy().tolist()
