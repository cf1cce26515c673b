"""The loss kernels of the MindSpore backend: both routes, native collectives, memory."""

from __future__ import annotations

import sys

import pytest

from tests.mindspore.remote import run

pytestmark = pytest.mark.platform("mindspore")

_CALLS = {
    "plain": ("float32", (7, 10), 1, {}),
    "uneven": ("float32", (5, 7), 1, {"weighted": True}),
    "fewer classes than ranks": ("float32", (5, 3), 1, {}),
    "one dim": ("float32", (9,), 0, {}),
    "images": ("float32", (2, 6, 3, 2), 1, {"weighted": True}),
    "classes last": ("float32", (2, 3, 6), 2, {}),
    "no rows": ("float32", (0, 6), 1, {}),
    "smoothing": ("float32", (5, 7), 1, {"label_smoothing": 0.2, "weighted": True}),
    "z-loss": ("float32", (5, 7), 1, {"z_loss": 0.01}),
    "many": ("float32", (300, 1200), 1, {}),
    "half": ("float16", (5, 7), 1, {}),
    "double": ("float64", (5, 7), 1, {"label_smoothing": 0.1}),
}


@pytest.mark.contract("K2", "K3", "P2", "P3")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("route", ["host", "device"])
@pytest.mark.parametrize("name", _CALLS)
def test_cross_entropy(name: str, route: str, size: int) -> None:
    """The operators meant for accelerators run on CPU as well, and give the same."""
    dtype, shape, dim, options = _CALLS[name]
    run("loss_workers", "cross_entropy", route, dtype, shape, dim, False, options, world_size=size)


@pytest.mark.contract("K2", "K3")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bfloat16(size: int) -> None:
    """On CPU in NumPy: MindSpore has few operators for it there."""
    for options in ({}, {"label_smoothing": 0.1, "weighted": True}):
        run("loss_workers", "cross_entropy", "host", "bfloat16", (5, 7), 1, False, options, world_size=size)
    run("loss_workers", "log_softmax", "host", "bfloat16", False, world_size=size)


@pytest.mark.contract("K1")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("route", ["host", "device"])
def test_log_softmax(route: str, size: int) -> None:
    for dtype in ("float32", "float64", "float16"):
        run("loss_workers", "log_softmax", route, dtype, False, world_size=size)


@pytest.mark.contract("G2", "K3")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("route", ["host", "device"])
def test_native_collectives(route: str, size: int) -> None:
    """One forward, none backward; log_softmax alone one backward. (Stand-ins for the accelerator's operators.)"""
    calls = run("loss_workers", "cross_entropy", route, "float32", (6, 9), 1, True, {"weighted": True}, world_size=size)
    assert calls == [["AllGather"]] * size
    calls = run("loss_workers", "log_softmax", route, "float32", True, world_size=size)
    assert calls == [["AllGather", "AllReduce"]] * size


@pytest.mark.contract("G1", "G2")
@pytest.mark.parametrize("size", [2, 4])
def test_overlap(size: int) -> None:
    """Each block's exchange starts before the next one's arithmetic, and all are waited for after the last.

    (Stand-ins for the accelerator's operators.) On CPU there is one exchange.
    """

    def calls(route: str, shape: tuple[int, ...], dim: int, **options: object) -> list[str]:
        given = {"overlap_blocks": 3, **options}
        found = run("loss_workers", "cross_entropy", route, "float32", shape, dim, True, given, world_size=size)
        assert found == [found[0]] * size
        return list(found[0])

    blocks = ["arithmetic", "start AllGather"] * 3 + ["wait AllGather"] * 3
    assert calls("device", (7, 9), 1) == blocks
    assert calls("device", (2, 3, 3), 1, label_smoothing=0.1, weighted=True, z_loss=0.1) == blocks
    assert calls("device", (2, 3, 9), 2, label_smoothing=0.1, entropy=True) == blocks
    few = ["arithmetic", "start AllGather"] * 2 + ["wait AllGather"] * 2
    assert calls("device", (2, 9), 1, overlap_blocks=50) == few
    maxima = [name.replace("Gather", "Reduce") for name in blocks]
    assert calls("device", (7, 9), 1, largest_gather=0) == [*maxima, "AllReduce"]
    assert calls("host", (7, 9), 1) == ["arithmetic", "AllGather"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("route", ["host", "device"])
def test_strategies(route: str, size: int) -> None:
    run("loss_workers", "strategies", route, world_size=size)


@pytest.mark.contract("K1", "K2")
def test_second_derivatives() -> None:
    """A clear error, not a wrong number."""
    for messages in run("loss_workers", "twice", world_size=2):
        assert len(messages) == 9 and all("cannot be differentiated twice" in m for m in messages), messages


@pytest.mark.contract("TRAP11")
def test_inplace() -> None:
    run("loss_workers", "inplace", world_size=2)


@pytest.mark.contract("G2")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory() -> None:
    """Beyond the logits there is their gradient, and chunks that fit the cache. (AllGather and the framework's own
    loss take 32 times the local logits at two ranks.)"""
    assert max(run("loss_workers", "memory", 512, 8192, world_size=2, timeout=60)) < 1.5
