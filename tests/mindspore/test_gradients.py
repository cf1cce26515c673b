"""Trap 13: MindSpore's own communication operators differentiate to others, with gradients times the degree."""

from __future__ import annotations

import pytest

from tests.mindspore.remote import run

pytestmark = pytest.mark.platform("mindspore")

_STEPS = [(a, b) for a in ("S0", "S1", "R", "P") for b in ("S0", "S1", "R", "P") if a != b]


@pytest.mark.contract("TRAP13", "G4")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("source", "target"), _STEPS)
def test_collectives(size: int, source: str, target: str) -> None:
    """Through every collective, and back to the whole tensor."""
    run("gradient_workers", "through", source, target, world_size=size)


@pytest.mark.contract("TRAP13")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_products(size: int, kind: str) -> None:
    """Weight, bias and input of a shared linear layer, over weights and inputs of an nn.Cell."""
    run("gradient_workers", "layer", kind, world_size=size)


@pytest.mark.contract("TRAP13", "G1", "TRAP10")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("entry", ["ops", "mint", "nn", "mint.nn"])
def test_training(size: int, entry: str) -> None:
    """Embedding, head and loss share a table of 11 rows; the backward pass runs outside of the context."""
    run("gradient_workers", "training", entry, world_size=size)


@pytest.mark.contract("TRAP13")
def test_compiled() -> None:
    """Graph mode has a route of its own: ``nn.Cell.bprop``."""
    run("gradient_workers", "compiled", world_size=2)
