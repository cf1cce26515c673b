"""Styles on small modules: outputs and every gradient are those of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.placement_types import Replicate, Shard
from tests.conformance.groups import on_groups
from tests.harness import run_distributed

VOCAB = 11
LENGTH = 7  # over 2 ranks: (4, 3); over 4: (2, 2, 2, 1)

MLP_PLAN = {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}


def plans() -> dict[str, dict[str, Any]]:
    from hyper_parallel.tensor_parallel.prepare import (
        NoParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        SequenceParallel,
    )
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel, RowwiseParallel

    rows_of_sequence = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    sequence = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "layers.*.norm": SequenceParallel(),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": rows_of_sequence,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return {
        "mlp": MLP_PLAN,
        "mlp with vocabulary": {**MLP_PLAN, "embed": "embedding_rowwise", "head": "colwise_gather_output"},
        "class-sharded": {**MLP_PLAN, "head": "colwise_loss_parallel"},
        "hidden-sharded embedding": {"embed": "embedding_colwise", **MLP_PLAN},
        "column alone": {"layers.*.mlp.gate": "colwise_rep", "layers.*.mlp.up": "colwise_gather_output"},
        "row alone": {"layers.*.mlp.down": "rowwise_split_input"},
        "column gives a sequence": {
            "layers.*.mlp.gate": ColwiseParallel(output_layouts=Shard(1)),
            "layers.*.mlp.up": ColwiseParallel(output_layouts=Shard(1), use_local_output=True),
            "layers.*.mlp.down": RowwiseParallel(input_layouts=Shard(1)),
        },
        "sequence parallel": sequence,
        "whole modules": {"layers.*.mlp": NoParallel(), "layers.*.norm": "replicate"},
        "inputs and outputs": {
            **MLP_PLAN,
            "layers.0.mlp": PrepareModuleInputOutput(
                input_layouts=Replicate(),
                desired_input_layouts=Shard(1),
                output_layouts=Replicate(),
                desired_output_layouts=Replicate(),
            ),
            "layers.1.norm": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
            ),
            "layers.1.mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        },
    }


def apply_plan(name: str, fused: bool, tied: bool, length: int) -> tuple[float, float, str]:
    from hyper_parallel import DTensor
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.model_steps import beside_one_device, worst_gradient

    plan = {
        **plans(),
        "fused": {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down": "rowwise"},
        "packed": {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down": "rowwise"},
        "fused and gathered": {"layers.*.mlp.gate_up_proj": "colwise_gather_output"},
        "head of a tied model": {"head": "colwise_gather_output"},
        "embedding of a tied model": {"embed": "embedding_rowwise"},
    }[name]
    adapter = this_adapter()
    ids = adapter.tensor(np.random.default_rng(0).integers(0, VOCAB, (2, length)), "int64")

    def whole(model: Any, ids: Any) -> Any:
        y = model(ids)
        return y.full_tensor() if isinstance(y, DTensor) else y

    one, own, named = beside_one_device(
        lambda: adapter.module("Tiny", fused, tied),
        lambda model: parallelize_module(model, adapter.mesh["tp"], plan),
        [ids],
        np.random.default_rng(1).standard_normal((2, length, VOCAB)),
        whole,
    )
    return float(np.abs(own.value - one.value).max()), *worst_gradient(one, own, named)


@pytest.mark.contract("T4")
@on_groups(1, 2, 4)
@pytest.mark.parametrize(
    ("name", "fused", "tied"),
    [
        ("mlp", False, False),
        ("mlp with vocabulary", False, False),
        ("mlp with vocabulary", False, True),
        ("class-sharded", False, False),
        ("class-sharded", False, True),
        ("hidden-sharded embedding", False, False),
        ("column alone", False, False),
        ("row alone", False, False),
        ("column gives a sequence", False, False),
        ("sequence parallel", False, False),
        ("sequence parallel", False, True),
        ("whole modules", False, False),
        ("inputs and outputs", False, False),
        ("fused", True, False),
        ("packed", True, False),
        ("fused and gathered", True, False),
        ("head of a tied model", False, True),
        ("embedding of a tied model", False, True),
    ],
)
def test_plan(name: str, fused: bool, tied: bool, platform: str, world_size: int) -> None:
    """Parts of a fused weight are each cut on their own (Automodel#1324, vllm#36242)."""
    length = 8 if name == "column gives a sequence" else LENGTH  # plain tensors cannot say that they are uneven
    found = run_distributed(apply_plan, name, fused, tied, length, platform=platform, world_size=world_size)
    # MindSpore's CPU kernel sums the gradients of a LayerNorm's parameters in float32, whatever their dtype
    tolerance = 1e-6 if platform == "mindspore" and name == "sequence parallel" else 1e-12
    for value, gradient, where in found:
        assert value < 1e-12 and gradient < tolerance, where


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
@pytest.mark.parametrize(("length", "world_size"), [(1, 2), (5, 4)])
def test_a_rank_without_any_of_the_sequence(platform: str, length: int, world_size: int) -> None:
    """It adds nothing to the gradients of biases and norms: MindSpore leaves the sum of nothing uninitialised."""
    found = run_distributed(
        apply_plan, "sequence parallel", False, False, length, platform=platform, world_size=world_size
    )
    for value, gradient, where in found:
        assert value < 1e-12 and gradient < (1e-6 if platform == "mindspore" else 1e-12), where


def prepared(case: str) -> tuple[bool, ...]:
    from hyper_parallel import DTensor
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    seen: list[Any] = []
    model = adapter.module("Outer")
    style = PrepareModuleInput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(1), None) if case == "positional" else (Replicate(), None),
        input_kwarg_layouts={"scale": Replicate()},
        desired_input_kwarg_layouts={"scale": Replicate()},
        use_local_output=case == "positional",
    )
    parallelize_module(model, adapter.mesh, {"": style})
    model.inner.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    y, _ = model(adapter.tensor(np.ones((2, 4, 6))), "kept", scale=adapter.tensor(np.array(2.0)))
    return isinstance(seen[0], DTensor), isinstance(y, DTensor), tuple(seen[0].shape) == (2, 2, 6)


@on_groups(2)
@pytest.mark.parametrize(("case", "expected"), [("positional", (False, False, True)), ("kwargs", (True, True, False))])
def test_prepared_inputs(platform: str, world_size: int, case: str, expected: tuple[bool, ...]) -> None:
    assert run_distributed(prepared, case, platform=platform, world_size=world_size) == [expected] * 2
