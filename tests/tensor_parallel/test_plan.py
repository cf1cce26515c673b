"""Plans: what they match, what they refuse (on every rank, before anything is changed), what they report."""

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


def refused(case: str) -> None:
    import torch
    from torch import nn

    from hyper_parallel.core.placement_types import Partial, Replicate
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel
    from tests.tensor_parallel.small_models import build
    from tests.tensor_parallel.small_modules import tiny
    from tests.tensor_parallel.torch_workers import tp_mesh

    class Scaled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    model: Any = tiny(fused=case == "parts", tied=case == "tied")
    plan: Any = {"layers.*.mlp.up": "colwise"}
    if case == "misspelt":
        plan = {"layers.*.mlp.upp": "colwise"}
    elif case == "unknown kind":
        plan = {"head": "colwize"}
    elif case == "experts":
        plan = {"layers.*.mlp": "moe_tp_experts"}
    elif case == "not a layer":
        plan = {"layers.*.norm": "rowwise"}
    elif case == "own forward":
        model.head = Scaled(6, 11)
        plan = {"head": "colwise"}
    elif case == "max_norm":
        model.embed.max_norm = 1.0
        plan = {"embed": "embedding_rowwise"}
    elif case == "parts":
        plan = {"layers.*.mlp.gate_up_proj": ColwiseParallel(parts=(3, 4))}
    elif case == "gathered parts":
        plan = {"head": ColwiseParallel(parts=(4, 7), use_local_output=False)}
    elif case == "heads":
        plan = {"head": ColwiseParallel(heads=11)}
    elif case == "partial":
        plan = {"head": ColwiseParallel(output_layouts=Partial())}
    elif case == "tied":
        plan = {"head": "colwise", "embed": "embedding_colwise"}
    elif case == "layouts":
        plan = {"head": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=())}
    elif case == "no plan known":
        plan = "auto"
    elif case == "no plan":
        plan = None
    elif case == "twice":
        parallelize_module(model, tp_mesh(), plan)
    elif case == "one rank":
        plan = {"headd": "colwise"} if this_rank() == 1 else plan
    elif case == "other models":
        model.head = nn.Linear(6, 11 + this_rank())
    elif case == "query heads":
        model, plan = build("llama", heads=3, key_values=3), "auto"
    elif case == "key/value heads":
        model, plan = build("llama", heads=12, key_values=3), "auto"
    elif case == "left out":
        plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    elif case == "norm of heads":
        model = build("qwen3")
        plan = {f"layers.*.self_attn.{n}_proj": "rowwise" if n == "o" else "colwise" for n in "qkvo"}
    elif case == "mixture of experts":
        import transformers

        config = transformers.MixtralConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2,
        )  # fmt: skip
        model, plan = transformers.MixtralForCausalLM(config), "auto"
    shapes = [tuple(p.shape) for p in model.parameters()]
    try:
        parallelize_module(model, tp_mesh(), plan)
    finally:
        if case != "twice":
            assert shapes == [tuple(p.shape) for p in model.parameters()]
        assert all(type(m).__name__ != "ParallelLinear" for m in model.modules()) or case == "twice"
        assert torch.is_grad_enabled()


REFUSED = {
    "misspelt": ("names no module", "near matches: layers.*.mlp.up", "layers.*.mlp.down"),
    "unknown kind": ("'colwize'", "'colwise_gather_output'"),
    "experts": ("'moe_tp_experts' is not supported", "mixture-of-experts"),
    "not a layer": ("RowwiseParallel cannot treat layers.0.norm", "LayerNorm"),
    "own forward": ("ColwiseParallel cannot treat head", "Scaled"),
    "max_norm": ("embed", "max_norm=1.0"),
    "parts": ("(3, 4) add up to 7", "20"),
    "gathered parts": ("head", "use_local_output=True"),
    "heads": ("11 heads", "2 tensor-parallel ranks"),
    "partial": ("Shard(dim) or Replicate()", "Partial"),
    "tied": ("one parameter under several names", "embed.weight: dim 1", "head.weight: dim 0"),
    "layouts": ("head", "1 layouts", "0"),
    "no plan known": ("no plan is known for Tiny", "gpt2"),
    "no plan": ("expected 'auto'", "None"),
    "twice": ("layers.0.mlp.up.", "already shared"),
    "one rank": ("'headd' names no module",),
    "other models": ("ranks 0 and 1 have different models", "(11, 6)", "(12, 6)"),
    "query heads": ("model.layers.0.self_attn", "3 attention heads", "2 tensor-parallel ranks"),
    "key/value heads": ("3 key/value heads", "2 tensor-parallel ranks"),
    "left out": ("layers.0.mlp.gate has parameters", "among features that are sharded", "give it a rule"),
    "norm of heads": ("self_attn.q_norm", "replicated_with_grad_allreduce"),
    "mixture of experts": ("not supported", "mixture-of-experts"),
}


@pytest.mark.contract("T4")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(case: str) -> None:
    errors = run_distributed(refused, case, world_size=2, expect_error=True, timeout=60.0)
    for error in errors:
        assert error.type == "ParallelPlanError", error
        for text in REFUSED[case]:
            assert text in error.message, error.message
    if case == "one rank":
        assert errors[0].message.startswith("rank 1: ")


def not_a_tensor() -> None:
    import torch

    from hyper_parallel.core.placement_types import Replicate
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.prepare import PrepareModuleInput
    from tests.tensor_parallel.small_modules import Outer
    from tests.tensor_parallel.torch_workers import tp_mesh

    style = PrepareModuleInput(input_layouts=(Replicate(),) * 2, desired_input_layouts=(Replicate(),) * 2)
    model = parallelize_module(Outer(), tp_mesh(), style)
    model(torch.ones(2, 6), "kept", scale=1)


def test_a_placement_for_what_is_no_tensor() -> None:
    for error in run_distributed(not_a_tensor, world_size=2, expect_error=True):
        assert error.type == "TypeError" and "for a str" in error.message


def not_a_module() -> None:
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.torch_workers import tp_mesh

    parallelize_module([1], tp_mesh(), {})  # type: ignore[arg-type]


def test_not_a_module() -> None:
    for error in run_distributed(not_a_module, world_size=2, expect_error=True):
        assert error.type == "TypeError" and "found list" in error.message


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
    for loss, gradient, where in run_distributed(own_llama, tied, sequence_parallel, world_size=world_size):
        assert loss < 1e-6 and gradient < 1e-5, where
