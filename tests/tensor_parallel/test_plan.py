"""Plans: what they match, what they do, what they report."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.tensor_parallel.patterns import generic, match_patterns
from tests.harness import run_distributed, this_rank

pytestmark = pytest.mark.platform("torch")

NAMES = ["", "model", "model.layers", "model.layers.0", "model.layers.0.up", "model.layers.11", "model.layers.11.up"]


def test_patterns() -> None:
    def match(*patterns: str) -> Any:
        return match_patterns(list(patterns), NAMES, ["model"], ["model.layers.0.up.weight"], ["model.layers.0.up"])

    ups = ("model.layers.0.up", "model.layers.11.up")
    assert match("model.layers.*.up") == {"model.layers.*.up": ups}
    assert match("layers.*.up") == {"layers.*.up": ups}
    assert match("layers.0.up", "layers.1?.up") == {"layers.0.up": ups[:1], "layers.1?.up": ups[1:]}
    assert match("") == {"": ("",)}
    assert generic("model.layers.11.up") == "model.layers.*.up"
    with pytest.raises(ParallelPlanError, match=r"'layers.\*' and 'layers.0' both name 'model.layers.0'"):
        match("layers.*", "layers.0")
    with pytest.raises(ParallelPlanError, match=r"near matches: model.layers.\*.up, .*; linear layers .* model.la"):
        match("layers.*.upp")
    with pytest.raises(ParallelPlanError, match="names a parameter"):
        match("layers.*.up.weight")
    with pytest.raises(ParallelPlanError, match=r"'layers\*.up' names no module"):
        match("layers*.up")  # a star stands for one part of a name


def report() -> tuple[str, tuple[int, ...], tuple[str, ...], list[tuple[int, ...]]]:
    from hyper_parallel.tensor_parallel.plan import parallelize_module, sharding_report
    from tests.tensor_parallel.small_modules import tiny
    from tests.tensor_parallel.torch_workers import tp_mesh

    model = tiny(tied=True)
    plan = {"layers.*.mlp.down": "rowwise_rep", "layers.0.mlp.up": "colwise_rep", "head": "colwise_loss_parallel"}
    parallelize_module(model, tp_mesh(), plan)
    found = sharding_report(model)
    return str(found), found.rank_bytes, found.unsharded_linears, [tuple(p.shape) for p in model.parameters()]


def test_report() -> None:
    results = run_distributed(report, world_size=2)
    for rank, (text, rank_bytes, unsharded, shapes) in enumerate(results):
        local = sum(8 * _product(s) for s in shapes)
        assert rank_bytes[rank] == local
        assert unsharded == ("layers.0.mlp.gate", "layers.1.mlp.gate", "layers.1.mlp.up")
        for line in (
            "tensor parallel over 2 ranks",
            "layers.*.mlp.down: RowwiseParallel R -> R, 2 modules, 576 B",
            "    layers.*.mlp.down.weight: (6, 10) -> (6, 5) x 2",
            "    layers.*.mlp.down.bias: (6,) x 2",
            "layers.0.mlp.up: ColwiseParallel -> R, 1 module",
            "head: ColwiseParallel -> S(-1) DTensor",
            "embed (tied to head): RowwiseParallel R -> R, 1 module, 288 B",
            f"    head.weight: (11, 6) -> ({6 - rank}, 6), tied to embed.weight",
            "    layers.*.norm.weight: (6,) x 2",
            "linear layers and embeddings left whole: layers.0.mlp.gate, layers.1.mlp.gate, layers.1.mlp.up",
        ):
            assert line in text, text


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] * _product(shape[1:]) if shape else 1


def on_meshes() -> list[tuple[int, ...]]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh as init_native

    from hyper_parallel import init_device_mesh
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel

    ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    native = init_native("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shapes = []
    for mesh in (ours, ours["tp"], native, native["tp"]):
        layer = torch.nn.Linear(4, 10)
        parallelize_module(module=layer, device_mesh=mesh, parallelize_plan=ColwiseParallel())
        shapes.append(tuple(layer.weight.shape))
    return shapes


def test_meshes() -> None:
    assert run_distributed(on_meshes, world_size=4) == [[(5, 4)] * 4] * 4


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


def fifth_kind() -> tuple[int, ...]:
    import torch

    from hyper_parallel.tensor_parallel import shard_loader
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel
    from tests.tensor_parallel.torch_workers import tp_mesh

    try:
        importlib.import_module("tests.tensor_parallel.fp8_loader")
        layer = torch.nn.Linear(4, 10)
        parallelize_module(layer, tp_mesh(), ColwiseParallel(kind="column_fp8"))
        return tuple(layer.weight.shape)
    finally:
        shard_loader._registry.pop("column_fp8", None)


@pytest.mark.contract("S2")
def test_a_users_loader_kind_in_a_plan() -> None:
    assert run_distributed(fifth_kind, world_size=2) == [(5, 4)] * 2


def own_llama(tied: bool, sequence_parallel: bool) -> tuple[float, float, str]:
    """The library's own Llama, which brings no plan and whose attention has no config."""
    import torch
    import torch.nn.functional as F

    from hyper_parallel import loss_parallel
    from hyper_parallel.models.llama import LlamaConfig, build_llama
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.small_models import gradient_error, tokens, value
    from tests.tensor_parallel.torch_workers import tp_mesh

    config = LlamaConfig(
        vocab_size=251,
        hidden_size=32,
        intermediate_size=46,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = build_llama(config).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.2)
        models.append(model)
    reference, model = models
    ids = tokens()
    expected = F.cross_entropy(reference(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    expected.backward()
    parallelize_module(model, tp_mesh(), sequence_parallel=sequence_parallel)
    with loss_parallel():
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
    worst, where = gradient_error(reference, model, this_rank())
    return abs(value(loss) - float(expected)), worst, where


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_own_llama(tied: bool, sequence_parallel: bool, world_size: int) -> None:
    found = run_distributed(own_llama, tied, sequence_parallel, world_size=world_size, timeout=60.0)
    for loss, gradient, where in found:
        assert loss < 1e-6 and gradient < 1e-5, where
