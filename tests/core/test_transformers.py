"""Code of others around the loss runs unmodified on DTensors."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.core.remote import run

pytestmark = [
    pytest.mark.platform("torch"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.mark.contract("G1", "P2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("world_size", [4])
def test_causal_lm_loss(mesh_shape: tuple[int, ...], world_size: int, dtype: str) -> None:
    run("transformers_workers", "causal_lm_loss", mesh_shape, dtype, world_size=world_size)
