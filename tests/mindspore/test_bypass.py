"""A local value is never taken for the global one, however MindSpore gets at it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.mindspore.remote import run

pytestmark = pytest.mark.platform("mindspore")


@pytest.mark.contract("G4")
@pytest.mark.parametrize(
    "name",
    [
        "metadata",
        "host_values",
        "refusals",
        "rebinding",
        "plain_on_the_left",
        "lists_and_indices",
        "skipped",
        "graph_mode",
        "mint_dropout_without_training",
    ],
)
def test_bypass(name: str) -> None:
    run("bypass_workers", name, world_size=2)


@pytest.mark.contract("G4")
@pytest.mark.parametrize(
    "name", ["bytecode", "bytecode_afterwards", "bytecode_by_name", "another_version", "ast", "trace"]
)
def test_compiled(name: str) -> None:
    """Global, closure, attribute, member, default, made inside, a shared model: the right values, or refused."""
    run("compiled_workers", name, world_size=2)


def test_dropout() -> None:
    """One mask for what is replicated, different ones for different parts, reproducible."""
    found = run("bypass_workers", "random", world_size=2)
    first, second, third, again = found[0]
    for other in found[1]:
        assert other.shape == (8, 16)
    assert np.array_equal(first, found[1][0]) and np.array_equal(second, found[1][1])
    assert np.array_equal(third, found[1][2]) and np.array_equal(again, first)
    assert not np.array_equal(first, third) and not np.array_equal(second[:4], second[4:])
    assert all(0.3 < (mask != 0).mean() < 0.7 for mask in (first, second, third))


def test_tables() -> None:
    """Every name in the tables is a primitive of MindSpore, or of an older spelling of a Tensor method."""
    ((names, primitives),) = run("bypass_workers", "table_names", world_size=1)
    unknown = set(names) - set(primitives) - {"getitem", "tile"}
    assert len(names) > 200 and all(name.startswith("Deprecated") for name in unknown), unknown
