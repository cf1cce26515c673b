"""The routed loss functions: all entry points, captured references, compilation, threads, cost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.mindspore.remote import run

pytestmark = pytest.mark.platform("mindspore")


@pytest.mark.contract("G3")
def test_plain_tensors() -> None:
    run("route_workers", "faces", world_size=1)


@pytest.mark.contract("G3")
def test_compilation_of_plain_tensors() -> None:
    """In a process of its own: of what was compiled there before, MindSpore keeps parts that do not fit each other."""
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "mindspore"}
    done = subprocess.run(
        [sys.executable, "-c", "from tests.mindspore.route_workers import compilation; compilation()"],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.contract("E3", "G3", "I2")
def test_outside() -> None:
    run("route_workers", "outside", world_size=2)


def test_overhead() -> None:
    """A few microseconds at most, beside a loss of some hundred."""
    (seconds,) = run("route_workers", "overhead", world_size=1)
    assert seconds < 10e-6


PATCHED_BEFORE = """
import mindspore
from mindspore import Tensor, ops
import numpy as np
original = Tensor.__getitem__
Tensor.__getitem__ = lambda self, index: original(self, index)  # as MindSpore's own dry run does
from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.errors import HyperParallelError
mesh = init_device_mesh("cpu", (1,))
logits = distribute_tensor(Tensor(np.ones((2, 3), np.float32)), mesh, [Shard(1)])
for call in (
    lambda: ops.cross_entropy(logits, Tensor([0, 1], mindspore.int32)),
    lambda: Tensor(np.arange(6.0))[[distribute_tensor(Tensor([1, 2]), mesh, [Shard(0)])]],
):
    try:
        call()
    except HyperParallelError as error:
        print(type(error).__name__)
"""


def test_somebody_elses_patch_is_no_installation() -> None:
    """MindSpore's methods may have been replaced before; the routes are there nevertheless."""
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "mindspore"}
    done = subprocess.run(
        [sys.executable, "-c", PATCHED_BEFORE], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout.split()[-2:] == ["LossParallelLayoutError", "UnsupportedOperatorError"], done.stderr


@pytest.mark.contract("P1")
def test_an_argument_that_one_rank_misspells() -> None:
    for first, second in run("route_workers", "misspelt", world_size=2):
        assert "rank 1" in first and "bogus" in first
        assert abs(float(second)) < 1e-5


def test_graph_mode_of_shared_layers_is_refused() -> None:
    for message in run("route_workers", "shared_layers_in_graph_mode", world_size=2):
        assert message.startswith("SequentialCell was given to parallelize_module (layer '0'), which graph mode")
