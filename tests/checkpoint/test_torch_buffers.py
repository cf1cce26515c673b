"""PyTorch: buffers of modules that were built on the meta device are computed again, or are an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.files import write_checkpoint
from tests.harness import run_distributed

pytestmark = [pytest.mark.platform("torch"), pytest.mark.contract("S3")]


def unknown_buffer(path: str | None) -> None:
    import torch

    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint
    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint.torch_odd_modules import odd_model

    with torch.device("meta"):
        model = odd_model(unknown=True)
    if path is None:
        materialize(model)
    else:
        load_hf_checkpoint(model, path)


def persistent_buffer() -> None:
    import torch

    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint.torch_odd_modules import odd_model

    with torch.device("meta"):
        materialize(odd_model(mean=True))


def test_a_persistent_buffer_is_drawn_by_nobody() -> None:
    errors = run_distributed(persistent_buffer, world_size=2, expect_error=True)
    assert [e.type for e in errors] == ["CheckpointError"] * 2
    assert len(set(errors)) == 1
    assert "mean.mean (nothing in the model's code initialises it)" in errors[0].message


def test_a_buffer_that_nobody_can_compute(tmp_path: Path) -> None:
    tensors = {"linear.weight": np.ones((5, 6), np.float32), "linear.bias": np.ones(5, np.float32)}
    for path in (None, str(write_checkpoint(tmp_path, tensors))):
        errors = run_distributed(unknown_buffer, path, world_size=1, expect_error=True)
        assert "left without values: unknown.table" in errors[0].message


def odd_buffers(path: str) -> dict[str, Any]:
    import torch

    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint
    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint.torch_odd_modules import odd_model

    expected: Any = odd_model(mean=True)
    found = {}
    for way in ("load", "draw"):
        with torch.device("meta"):
            model: Any = odd_model(mean=way == "load")
        if way == "load":
            load_hf_checkpoint(model, path)
        else:
            materialize(model, seed=1)
        found[way] = (
            torch.equal(model["old"].inv_freq, expected["old"].inv_freq)
            and model["old"].original_inv_freq is model["old"].inv_freq
            and torch.equal(model["mask"].mask, expected["mask"].mask)
        )
        bound = 6**-0.5
        weight, bias = model["linear"].weight, model["linear"].bias
        found[f"{way}: linear"] = (float(weight.abs().max()) <= bound, float(bias.abs().max()) <= bound)
        found[f"{way}: std"] = float(weight.std())
        if way == "load":
            found["mean"] = model["mean"].mean.tolist()
    return found


def test_buffers_are_computed_again(tmp_path: Path) -> None:
    tensors = {
        "linear.weight": np.ones((5, 6), np.float32),
        "linear.bias": np.ones(5, np.float32),
        "mean.weight": np.ones(3, np.float32),
        "mean.mean": np.full(3, 5, np.float32),
    }
    [found] = run_distributed(odd_buffers, str(write_checkpoint(tmp_path, tensors)), world_size=1)
    assert found["load"] and found["draw"] and found["mean"] == [5, 5, 5]
    assert found["draw: linear"] == (True, True) and found["draw: std"] > 0.1
