"""Plans on what PyTorch alone has: its own meshes, models on its meta device."""

from __future__ import annotations

from pathlib import Path
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


def saved_by_transformers(folder: str) -> None:
    """Of a shared model, its base model and a copy: an error on every rank. Of another model: as ever."""
    import copy
    import pickle

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.small_models import build
    from tests.tensor_parallel.torch_workers import tp_mesh

    model, other = build("llama"), build("llama")
    assert parallelize_module(model, tp_mesh()) is model
    twin = copy.deepcopy(model)
    for call in [m.save_pretrained for m in (model, model.model, twin, copy.copy(model))]:
        with pytest.raises(RuntimeError, match=r"save_hf_checkpoint\(model, path\) on every rank"):
            pickle.loads(pickle.dumps(call))(folder, state_dict=model.state_dict())
    assert not Path(folder).exists()
    other.save_pretrained(f"{folder}{tp_mesh().get_local_rank()}")


def saved_by_one(folder: str) -> bool:
    """The only rank of a group has the whole model."""
    import transformers

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.small_models import build
    from tests.tensor_parallel.torch_workers import tp_mesh

    model = parallelize_module(build("llama"), tp_mesh())
    model.save_pretrained(folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return bool((again.lm_head.weight == model.lm_head.weight).all())


def test_saving_a_part_as_the_whole_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_distributed(saved_by_transformers, str(tmp_path / "shared"), world_size=2, timeout=60.0)
    assert run_distributed(saved_by_one, str(tmp_path / "whole"), world_size=1, timeout=60.0) == [True]
