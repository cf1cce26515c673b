"""In the workers: the loss kernels on both routes, on emulated and native collectives, and what they cost."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common.api import _pynative_executor

from hyper_parallel import DTensor, Shard, get_platform, linear_cross_entropy
from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.loss_parallel import loss_parallel, reference
from hyper_parallel.platform import loss_statistics
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.mindspore import _loss_exchange as exchange
from hyper_parallel.platform.mindspore._loss_device import DeviceArithmetic
from hyper_parallel.platform.mindspore._loss_host import HostArithmetic
from hyper_parallel.platform.mindspore.attention import attention
from hyper_parallel.platform.mindspore.loss_kernels import MindSporeLossKernels
from hyper_parallel.platform.mindspore.rms_norm import rms_norm
from tests.mindspore.collective_workers import native_group
from tests.mindspore.op_checks import mesh_of

ROUTES: dict[str, Any] = {"host": HostArithmetic, "device": DeviceArithmetic}
TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "float16": 2e-3, "bfloat16": 1.6e-2}


def shard_of(classes: int, *, native: bool = False) -> ClassShard:
    size, rank = get_platform().world_size(), get_platform().rank()
    group = mesh_of((size,)).get_group()
    if native and size > 1:
        group = native_group(group)
    ranges = chunk_ranges(classes, size)
    return ClassShard(*ranges[rank], classes, group, tuple(ranges))


def close(found: Tensor, expected: np.ndarray, dtype: str) -> None:
    values = get_platform().to_numpy(found).astype(np.float64)
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(values, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


def rounded(array: np.ndarray, dtype: str) -> tuple[Tensor, np.ndarray]:
    """A tensor of ``dtype``, and its values."""
    wide = array.astype(np.float64 if dtype == "float64" else np.float32)
    tensor = Tensor(wide).astype(getattr(mindspore, dtype))
    return tensor, get_platform().to_numpy(tensor).astype(np.float64)


def cross_entropy(route: str, dtype: str, shape: tuple[int, ...], dim: int, native: bool, options: dict) -> list[str]:
    """Loss and gradient against the oracle; the collectives that ran natively, and with blocks the arithmetic."""
    kernels, rank, size = MindSporeLossKernels(ROUTES[route]()), get_platform().rank(), get_platform().world_size()
    classes = shape[dim]
    shard = shard_of(classes, native=native)
    calls: list[str] = getattr(shard.group.handle, "calls", [])
    entropy = options.pop("entropy", False)
    blocks, largest_gather = options.pop("overlap_blocks", 1), options.pop("largest_gather", 8)
    row_statistics = kernels.route.row_statistics
    if blocks > 1:
        kernels.route.row_statistics = lambda *args: (calls.append("arithmetic"), row_statistics(*args))[1]
    rng = np.random.default_rng(1)
    full, exact = rounded(rng.standard_normal(shape) * 4, dtype)
    token_shape = shape[:dim] + shape[dim + 1 :]
    target = rng.integers(0, classes, token_shape).astype(np.int32)
    target.reshape(-1)[::3] = -100
    weight = rng.uniform(0.5, 2.0, classes).astype(np.float32) if options.pop("weighted", False) else None
    upstream = rng.standard_normal(token_shape).astype(np.float32)
    tokens = reference.cross_entropy(reference.cut(exact, size, dim), dim, target, weight=weight, **options)
    local = Tensor(np.take(full.asnumpy(), range(shard.start, shard.stop), dim)) if dtype != "bfloat16" else None
    if local is None:
        local, _ = rounded(np.take(exact, range(shard.start, shard.stop), dim), dtype)
    seen: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        value, _, _, found = kernels.token_outputs(
            x,
            dim,
            Tensor(target),
            shard,
            None if weight is None else Tensor(weight),
            LossOptions(validate=False, overlap_blocks=blocks, entropy=entropy, **options),
        )
        seen.extend([value, found] if entropy else [value])
        return get_platform().sum_tokens(value * Tensor(upstream).astype(value.dtype))

    with patch.multiple(loss_statistics, _LARGEST_GATHER=largest_gather, _SMALL_GATHER=0):
        grad = mindspore.grad(loss)(local)
    assert grad.dtype == local.dtype and grad.shape == local.shape
    close(seen[0], tokens.loss, "float64" if dtype == "float64" else "float32")
    close(grad, tokens.backward(upstream)[rank], dtype)
    if entropy:
        close(seen[1], np.where(tokens.kept, reference.entropy(reference.cut(exact, size, dim), dim), 0.0), dtype)
    return calls


def log_softmax(route: str, dtype: str, native: bool) -> list[str]:
    kernels, rank, size = MindSporeLossKernels(ROUTES[route]()), get_platform().rank(), get_platform().world_size()
    shard = shard_of(7, native=native)
    rng = np.random.default_rng(2)
    _, exact = rounded(rng.standard_normal((3, 7, 2)) * 4, dtype)
    _, upstream = rounded(rng.standard_normal((3, 7, 2)), dtype)
    cut = reference.cut(exact, size, 1)
    local, _ = rounded(cut[rank], dtype)
    own, _ = rounded(reference.cut(upstream, size, 1)[rank], dtype)
    seen: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        seen.append(kernels.log_softmax(x, 1, shard, validate=False))
        return get_platform().linear_map(seen[0], lambda _: Tensor(np.float32(0)), lambda _: own)

    grad = mindspore.grad(function)(local)
    close(seen[0], reference.log_softmax(cut, 1)[rank], dtype)
    close(grad, reference.log_softmax_grad(cut, 1, reference.cut(upstream, size, 1))[rank], dtype)
    return list(getattr(shard.group.handle, "calls", []))


def strategies(route: str) -> None:
    """One all-gather and two all-reduces give the same, to rounding."""
    used = ROUTES[route]()
    shard = shard_of(9)
    rng = np.random.default_rng(3)
    x = Tensor(rng.standard_normal((5, shard.stop - shard.start)).astype(np.float32))
    with used.quietly():
        index = used.enter(Tensor(np.full(5, -1 if get_platform().rank() else 0, np.int32)))
        weight = used.enter(Tensor(np.ones(shard.stop - shard.start, np.float32)))
        maximum, sum_exp, shortfall, mean = used.row_statistics(used.enter(x), 1, None, weight, True)
        local = exchange.ShardStatistics(
            maximum, sum_exp, used.at_index(used.enter(x), 1, index), shortfall, weight.sum(), mean
        )
        results = [
            exchange.merge_statistics(used, local, shard.group, strategy=strategy) for strategy in ("gather", "reduce")
        ]
        for name in ("reference", "log_sum_exp", "share", "target_gap", "shortfall", "weight_sum", "mean"):
            a, b = (np.asarray(used.leave(getattr(r, name)).asnumpy()).reshape(-1) for r in results)
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6, err_msg=name)


def twice() -> list[str]:
    """Messages of second derivatives."""
    kernels, shard = get_platform().loss_kernels, shard_of(6)
    labels, few = (Tensor(np.array([0, last], np.int32)) for last in (5, 1))
    local = Tensor(np.ones((2, shard.stop - shard.start), np.float32))
    width = shard.stop - shard.start
    ones, row, head = (Tensor(np.ones(shape, np.float32)) for shape in ((2, width), (width,), (3, width)))
    heads, mask = (Tensor(np.ones((1, 1, 2, size), np.float32)) for size in (width, 2))

    def attend(x: Tensor, place: int) -> Tensor:
        return attention(*(x if i == place else heads for i in range(3)), mask) ** 2

    options = LossOptions(validate=False)
    functions: tuple[tuple[Any, Tensor], ...] = (
        (lambda x: kernels.cross_entropy(x, 1, labels, shard, None, options)[0], local),
        (lambda x: kernels.log_softmax(x, 1, shard, validate=False) ** 2, local),
        (lambda x: linear_cross_entropy(x, head, few, shard.group), local),
        (lambda x: linear_cross_entropy(ones, x, few, shard.group), local),
        (lambda x: rms_norm(x, row, 1e-6) ** 2, local),
        (lambda x: rms_norm(ones, x, 1e-6) ** 2, row),
        *((lambda x, i=i: attend(x, i), heads) for i in range(3)),
    )
    messages = []
    for function, at in functions:
        once = mindspore.grad(lambda x, f=function: get_platform().sum_tokens(f(x)))
        try:
            mindspore.grad(lambda x, g=once: get_platform().sum_tokens(g(x) ** 2))(at)
            messages.append("no error")
        except RuntimeError as error:
            messages.append(str(error).splitlines()[0])
        _pynative_executor.clear_res()  # else the executor goes on recording
        _pynative_executor.set_grad_flag(False)
    return messages


def inplace() -> None:
    """The logits' memory becomes the gradient; a leaf is refused."""
    kernels, shard = get_platform().loss_kernels, shard_of(8)
    labels = Tensor(np.array([0, 7, 3], np.int32))
    local = Tensor(np.random.default_rng(0).standard_normal((3, shard.stop - shard.start)).astype(np.float32))
    kept: list[Tensor] = []

    def loss(x: Tensor, options: LossOptions, leaf: bool = False) -> Tensor:
        logits = x if leaf else x * 1.0
        kept.append(logits)
        return get_platform().sum_tokens(kernels.cross_entropy(logits, 1, labels, shard, None, options)[0])

    options = LossOptions(validate=False)
    expected = mindspore.grad(lambda x: loss(x, options))(local).asnumpy()
    found = mindspore.grad(lambda x: loss(x, replace(options, inplace=True)))(local)
    np.testing.assert_array_equal(found.asnumpy(), expected)
    np.testing.assert_array_equal(kept[-1].asnumpy(), expected)
    try:
        mindspore.grad(lambda x: loss(x, replace(options, inplace=True), leaf=True))(local)
    except ValueError as error:
        assert "leaf" in str(error)
    else:
        raise AssertionError("the gradient was written over the caller's tensor")
    finally:
        _pynative_executor.clear_res()
        _pynative_executor.set_grad_flag(False)


def memory(rows: int, classes: int) -> float:
    """Peak memory of the first forward and backward beyond what was there, in units of the local logits."""
    mesh = mesh_of((get_platform().world_size(),))
    labels = Tensor(np.arange(rows, dtype=np.int32) % 16)

    def loss(x: Tensor) -> Tensor:
        with loss_parallel():
            return ops.cross_entropy(DTensor.from_local(x, mesh, [Shard(1)]), labels).to_local()

    step = mindspore.value_and_grad(loss)
    step(Tensor(np.zeros((rows, 16), np.float32)))[1].asnumpy()
    local = Tensor(np.random.default_rng(0).standard_normal((rows, classes), dtype=np.float32))
    local.asnumpy()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    value, grad = step(local)
    grad.asnumpy()
    return (status("VmHWM") - before) * 1024 / local.nbytes


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))
