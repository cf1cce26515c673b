"""Plans on what PyTorch alone has: its own meshes, models on its meta device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_distributed

pytestmark = pytest.mark.platform("torch")


def on_native_meshes() -> list[tuple[int, ...]]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel

    native = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shapes = []
    for mesh in (native, native["tp"]):
        layer = torch.nn.Linear(4, 10)
        parallelize_module(module=layer, device_mesh=mesh, parallelize_plan=ColwiseParallel())
        shapes.append(tuple(layer.weight.shape))
    return shapes


def test_native_meshes() -> None:
    assert run_distributed(on_native_meshes, world_size=4) == [[(5, 4)] * 2] * 4


def without_memory() -> tuple[Any, ...]:
    import torch

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.small_models import build
    from tests.tensor_parallel.torch_workers import tp_mesh

    whole = build("llama", tied=True)
    with torch.device("meta"):
        model = type(whole)(whole.config)
    parallelize_module(model, tp_mesh())
    parallelize_module(whole, tp_mesh())
    shapes = [[tuple(p.shape) for p in m.parameters()] for m in (whole, model)]
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return shapes[0] == shapes[1], all(p.is_meta for p in model.parameters()), tied


@pytest.mark.contract("S3")
def test_a_model_without_memory() -> None:
    pytest.importorskip("transformers")
    assert run_distributed(without_memory, world_size=2, timeout=60.0) == [(True, True, True)] * 2
