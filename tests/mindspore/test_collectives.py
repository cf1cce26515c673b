"""Collectives of the MindSpore backend: every dtype, emulated on CPU, and natively on stand-ins for the operators."""

from __future__ import annotations

import pytest

from tests.mindspore.remote import run

pytestmark = pytest.mark.platform("mindspore")

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("mesh", "size"), [((1,), 1), ((2,), 2), ((4,), 4), ((2, 2), 4)], ids=["1", "2", "4", "2x2"])
def test_emulated(dtype: str, mesh: tuple[int, ...], size: int) -> None:
    """Exact for moves and extrema; sums of 16-bit floats are rounded once."""
    run("collective_workers", "check", dtype, False, mesh, world_size=size)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "bool"])
@pytest.mark.parametrize(("mesh", "size"), [((2,), 2), ((4,), 4)], ids=["2", "4"])
def test_native(dtype: str, mesh: tuple[int, ...], size: int) -> None:
    """The same results; each collective is one operator. (No accelerator is at hand: stand-ins run the emulation.)"""
    calls = run("collective_workers", "check", dtype, True, mesh, world_size=size)
    expected = ["AllGather", *["Broadcast"] * size, "AllReduce", "AllReduce", "AllReduce"]
    expected += ["AllGather", "ReduceScatter", "AlltoAllV"]
    assert calls == [expected] * size


@pytest.mark.contract("T1")
def test_the_sum_overlaps_the_gradient_of_the_weight() -> None:
    """Started before the weight's gradient is computed, waited for afterwards."""
    for events, error in run("collective_workers", "order_of_backward", world_size=2):
        assert events == ["start", "weight", "wait"] and error < 1e-5


def test_the_overlapped_layer_can_be_differentiated_twice() -> None:
    assert max(run("collective_workers", "second_derivative", world_size=2)) < 1e-5


def test_extreme_values() -> None:
    run("collective_workers", "extreme_values", world_size=2)


def test_creation() -> None:
    """Groups of members only; the same ranks share one."""
    found = run("collective_workers", "creation", world_size=4)
    assert found == [([0, 1], [3.0]), ([0, 1], [3.0]), ([2, 3], [7.0]), ([2, 3], [7.0])]


@pytest.mark.parametrize("size", [2, 4])
def test_started_gather(size: int) -> None:
    """The ranks' vectors, in order, once they are waited for."""
    assert run("collective_workers", "started", world_size=size) == [[[float(r), 0.5] for r in range(size)]] * size
