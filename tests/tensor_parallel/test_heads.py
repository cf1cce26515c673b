"""Attention whose heads the ranks share: key and value heads held by several ranks, fused projections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.groups import on_groups
from tests.harness import run_distributed
from tests.tensor_parallel.arrays import values

PLAN = {"attn.q_proj": "colwise", "attn.k_proj": "colwise", "attn.v_proj": "colwise", "attn.o_proj": "rowwise"}
FUSED_PLAN = {"attn.qkv_proj": "colwise", "attn.o_proj": "rowwise"}


def attention(heads: int, key_values: int, fused: bool) -> dict[str, Any]:
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.model_steps import beside_one_device, worst_gradient

    adapter = this_adapter()
    shape = (2, 3, 2 * heads)
    one, own, named = beside_one_device(
        lambda: adapter.module("AttentionModel", heads, key_values, fused),
        lambda model: parallelize_module(model, adapter.mesh, FUSED_PLAN if fused else PLAN),
        [adapter.tensor(values(*shape) / 2)],
        values(*shape, seed=1),
    )
    one_grad, own_grad = one.inputs[0], own.inputs[0]
    name = "attn.qkv_proj.weight" if fused else "attn.k_proj.weight"
    spec = own.parameters[list(named).index(name)][1]
    return {
        "value": np.abs(own.value - one.value).max(),
        "input": np.abs(own_grad - one_grad).max() / np.abs(one_grad).max(),
        "parameters": worst_gradient(one, own, named),
        "ranges": spec.ranges[this_adapter().mesh.get_local_rank()] if spec.dim is not None else (),
        "calls": adapter.counts_changes,
        "backward": own.backward,
    }


@pytest.mark.contract("T4")
@on_groups(1, 2, 4)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("heads", "key_values"), [(4, 4), (4, 2), (4, 1), (8, 2)])
def test_heads(platform: str, world_size: int, heads: int, key_values: int, fused: bool) -> None:
    """Two key/value heads on four ranks work (transformers#48307, torchtitan#2577); fused parts are not mixed up."""
    found = run_distributed(attention, heads, key_values, fused, platform=platform, world_size=world_size)
    for result in found:
        assert result["value"] < 1e-12 and result["input"] < 1e-12
        assert result["parameters"][0] < 1e-12, result["parameters"]


@on_groups(4)
def test_who_holds_which_head(platform: str, world_size: int) -> None:
    """Ranks 0 and 1 the first key head, 2 and 3 the second (vllm#2379): rows of two for each head."""
    found = run_distributed(attention, 4, 2, False, platform=platform, world_size=world_size)
    assert [result["ranges"] for result in found] == [((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)]


@on_groups(2)
def test_the_input_gradient_is_summed_once(platform: str, world_size: int) -> None:
    """Queries, keys and values have one input."""
    for result in run_distributed(attention, 4, 2, False, platform=platform, world_size=world_size):
        assert result["backward"] == {"all_reduce": 1}


def refused(heads: int, key_values: int) -> None:
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    parallelize_module(adapter.module("AttentionModel", heads, key_values, False), adapter.mesh, PLAN)


@pytest.mark.contract("T4")
@on_groups(2)
@pytest.mark.parametrize(
    ("heads", "key_values", "text"), [(3, 3, "3 attention heads"), (12, 3, "3 key/value heads")]
)
def test_heads_that_do_not_fit(platform: str, world_size: int, heads: int, key_values: int, text: str) -> None:
    found = run_distributed(
        refused, heads, key_values, platform=platform, world_size=world_size, expect_error=True
    )
    for error in found:
        assert error.type == "ParallelPlanError" and text in error.message
        assert "2 tensor-parallel ranks" in error.message and "attn" in error.message
