"""The routed loss functions: all entry points, captured references, compilation, threads, cost."""

from __future__ import annotations

import pytest

from tests.mindspore.remote import run

pytestmark = pytest.mark.platform("mindspore")


@pytest.mark.contract("G3")
@pytest.mark.parametrize("name", ["faces", "compilation"])
def test_plain_tensors(name: str) -> None:
    run("route_workers", name, world_size=1)


@pytest.mark.contract("E3", "G3", "I2")
def test_outside() -> None:
    run("route_workers", "outside", world_size=2)


def test_overhead() -> None:
    """A few microseconds at most, beside a loss of some hundred."""
    (seconds,) = run("route_workers", "overhead", world_size=1)
    assert seconds < 10e-6
