"""Plans: what they match, what they do, what they report."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.tensor_parallel.patterns import generic, match_patterns
from tests.conformance.groups import on_groups
from tests.harness import run_distributed
from tests.tensor_parallel.arrays import values
from tests.tensor_parallel.parts import whole_of

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
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    model = adapter.module("Tiny", False, True)
    plan = {"layers.*.mlp.down": "rowwise_rep", "layers.0.mlp.up": "colwise_rep", "head": "colwise_loss_parallel"}
    parallelize_module(model, adapter.mesh, plan)
    found = sharding_report(model)
    shapes = [tuple(p.shape) for p in adapter.named_parameters(model).values()]
    return str(found), found.rank_bytes, found.unsharded_linears, shapes


@on_groups(2)
def test_report(platform: str, world_size: int) -> None:
    table = "embedding_table" if platform == "mindspore" else "weight"
    norm = "gamma" if platform == "mindspore" else "weight"
    for rank, (text, rank_bytes, unsharded, shapes) in enumerate(
        run_distributed(report, platform=platform, world_size=world_size)
    ):
        assert rank_bytes[rank] == sum(8 * _product(s) for s in shapes)
        assert unsharded == ("layers.0.mlp.gate", "layers.1.mlp.gate", "layers.1.mlp.up")
        for line in (
            "tensor parallel over 2 ranks",
            "layers.*.mlp.down: RowwiseParallel R -> R, 2 modules, 576 B",
            "    layers.*.mlp.down.weight: (6, 10) -> (6, 5) x 2",
            "    layers.*.mlp.down.bias: (6,) x 2",
            "layers.0.mlp.up: ColwiseParallel -> R, 1 module",
            "head: ColwiseParallel -> S(-1) DTensor",
            "embed (tied to head): RowwiseParallel R -> R, 1 module, 288 B",
            f"    head.weight: (11, 6) -> ({6 - rank}, 6), tied to embed.{table}",
            f"    layers.*.norm.{norm}: (6,) x 2",
            "linear layers and embeddings left whole: layers.0.mlp.gate, layers.1.mlp.gate, layers.1.mlp.up",
        ):
            assert line in text, text


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] * _product(shape[1:]) if shape else 1


def on_meshes() -> list[tuple[int, ...]]:
    from hyper_parallel import init_device_mesh
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel
    from tests.tensor_parallel.adapters import this_adapter

    ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shapes = []
    for mesh in (ours, ours["tp"]):
        layer = this_adapter().module("linear", 4, 10)
        parallelize_module(module=layer, device_mesh=mesh, parallelize_plan=ColwiseParallel())
        shapes.append(tuple(layer.weight.shape))
    return shapes


@on_groups(4)
def test_meshes(platform: str, world_size: int) -> None:
    assert run_distributed(on_meshes, platform=platform, world_size=world_size) == [[(5, 4)] * 2] * 4


def fifth_kind() -> tuple[int, ...]:
    from hyper_parallel.tensor_parallel import shard_loader
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel
    from tests.tensor_parallel.adapters import this_adapter

    try:
        importlib.import_module("tests.tensor_parallel.fp8_loader")
        layer = this_adapter().module("linear", 4, 10)
        parallelize_module(layer, this_adapter().mesh, ColwiseParallel(kind="column_fp8"))
        return tuple(layer.weight.shape)
    finally:
        shard_loader._registry.pop("column_fp8", None)


@pytest.mark.contract("S2")
@on_groups(2)
def test_a_users_loader_kind_in_a_plan(platform: str, world_size: int) -> None:
    assert run_distributed(fifth_kind, platform=platform, world_size=world_size) == [(5, 4)] * 2


def embedding_with_padding(style: str) -> tuple[np.ndarray, Any]:
    """The framework's embedding with a padding index, shared out: rows, and the gradient of the table."""
    from hyper_parallel import Replicate
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    layer = adapter.module("embedding", 5, 4, padding_idx=-1)
    rows, columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    parallelize_module(layer, adapter.mesh, rows if style == "rows" else columns)
    adapter.fill(layer.weight, values(5, 4))
    ids = adapter.tensor(np.array([[0, 4, 4], [1, 2, 0]]), "int64")
    found = adapter.differentiate(layer, [ids], [layer.weight], values(2, 3, 4, seed=1))
    return found.value, found.parameters[0]


@pytest.mark.contract("T4")
@on_groups(1, 2, 4)
@pytest.mark.parametrize("style", ["rows", "columns"])
def test_an_embedding_with_padding(platform: str, world_size: int, style: str) -> None:
    """On MindSpore of ``mint.nn``, which was once left out (hyper-parallel#756)."""
    ids, upstream = np.array([[0, 4, 4], [1, 2, 0]]), values(2, 3, 4, seed=1)
    gradient = np.zeros((5, 4))
    np.add.at(gradient, ids, upstream)
    gradient[4] = 0
    found = run_distributed(embedding_with_padding, style, platform=platform, world_size=world_size)
    for rows, _ in found:
        np.testing.assert_array_equal(rows, values(5, 4)[ids])
    np.testing.assert_allclose(whole_of([part for _, part in found]), gradient, rtol=1e-12)


def unchanged_code() -> dict[str, bool]:
    """Classes, names, ties, hooks and copies of a model that was shared out."""
    import copy

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    whole, model = adapter.module("Tiny", False, True), adapter.module("Tiny", False, True)
    before = dict(adapter.named_parameters(model))
    calls: list[int] = []
    model.layers[0].mlp.up.register_forward_hook(lambda *_: calls.append(1))
    plan = {"embed": "embedding_rowwise", "layers.*.mlp.up": "colwise_rep", "head": "colwise_gather_output"}
    returned = parallelize_module(model, adapter.mesh, plan)
    after = adapter.named_parameters(model)
    ids = adapter.tensor(np.array([[1, 2, 3]]), "int64")
    twin = copy.deepcopy(model)
    y = adapter.array(model(ids))
    for parameter in after.values():
        adapter.fill(parameter, np.zeros(tuple(whole_shape(parameter))))
    copied = adapter.named_parameters(twin)
    return {
        "same": returned is model and isinstance(model.head, type(whole.head)),
        "parameters": list(before) == list(after) and all(before[n] is after[n] for n in before),
        "hook": calls == [1],
        "independent": np.array_equal(adapter.array(twin(ids)), y),
        "marked": all(hasattr(copied[n], "_shard_spec") for n in ("embed.weight", "layers.0.mlp.up.bias")),
        "tied": copied["embed.weight"] is twin.head.weight and "head.weight" not in copied,
    }


def whole_shape(parameter: Any) -> tuple[int, ...]:
    spec = getattr(parameter, "_shard_spec", None)
    return spec.shape if spec is not None else tuple(parameter.shape)


@pytest.mark.contract("T4")
@on_groups(2)
def test_the_model_stays_what_it_was(platform: str, world_size: int) -> None:
    for found in run_distributed(unchanged_code, platform=platform, world_size=world_size):
        assert all(found.values()), found


def own_llama(tied: bool, sequence_parallel: bool, key_values: int) -> tuple[float, float, str]:
    """The library's own Llama, which brings no plan and whose attention has no config."""
    from hyper_parallel import DTensor, loss_parallel
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.model_steps import beside_one_device, worst_gradient

    adapter = this_adapter()
    tokens = np.random.default_rng(3).integers(1, 251, (2, 10))
    target = adapter.tensor(np.roll(tokens, -1, 1).reshape(-1), "int64")

    def loss(model: Any, ids: Any) -> Any:
        with loss_parallel():
            value = adapter.cross_entropy(adapter.flat(model(ids)), target)
            return value.full_tensor() if isinstance(value, DTensor) else value

    one, own, named = beside_one_device(
        lambda: adapter.module("own_llama", tied, key_values),
        lambda model: parallelize_module(model, adapter.mesh, sequence_parallel=sequence_parallel),
        [adapter.tensor(tokens, "int64")],
        1.0,
        loss,
    )
    return float(abs(own.value - one.value)), *worst_gradient(one, own, named)


@pytest.mark.contract("T4")
@on_groups(2, 4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_own_llama(tied: bool, sequence_parallel: bool, platform: str, world_size: int) -> None:
    found = run_distributed(
        own_llama, tied, sequence_parallel, 2, platform=platform, world_size=world_size, timeout=60.0
    )
    for loss, gradient, where in found:
        assert loss < 1e-6 and gradient < 1e-5, where


def last_layers() -> list[tuple[bool, tuple[int, ...], tuple[int, ...]]]:
    """The logits of the automatic plan: as the config says, and of the style written out."""
    from hyper_parallel import ColwiseParallel, DTensor, ParallelismConfig, Shard, get_platform
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    adapter, platform = this_adapter(), get_platform()
    tokens = adapter.tensor(np.arange(1, 11).reshape(2, 5), "int64")
    written_out: Any = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    found = []
    for plan, disabled in (("auto", False), ("auto", True), (written_out, False)):
        model = adapter.module("own_llama", False, 2)
        parallelize_module(model, adapter.mesh, plan, config=ParallelismConfig(disable_loss_parallel=disabled))
        logits = model(tokens)
        local = logits.to_local() if isinstance(logits, DTensor) else logits
        found.append((isinstance(logits, DTensor), tuple(logits.shape), platform.shape(local)))
    return found


@pytest.mark.contract("C5", "C1")
@on_groups(2)
def test_the_last_layer_follows_the_config(platform: str, world_size: int) -> None:
    """Class-sharded logits that stay a DTensor; whole local ones with ``disable_loss_parallel``."""
    for rank, found in enumerate(run_distributed(last_layers, platform=platform, world_size=world_size)):
        whole = found[1][1]
        half = (*whole[:-1], (whole[-1] + 1 - rank) // 2)
        assert found == [(True, whole, half), (False, whole, whole), (True, whole, half)]


def built_without_a_seed(alike: bool) -> list[str]:
    """What is warned of when ranks hand over their own random models."""
    import warnings

    from hyper_parallel.platform.modules import get_module_backend
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.harness import this_rank
    from tests.tensor_parallel.adapters import this_adapter

    adapter, backend = this_adapter(), get_module_backend()
    model = adapter.module("own_llama", False, 2)
    for _, part in backend.named_modules(model):
        for parameter in backend.own_parameters(part).values():
            shape = tuple(parameter.shape)
            backend.fill_parameter(parameter, np.full(shape, 1 if alike else this_rank(), np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(model, adapter.mesh)
    return [str(w.message) for w in caught if "different values" in str(w.message)]


@on_groups(2)
@pytest.mark.parametrize("alike", [True, False])
def test_ranks_with_different_values_are_warned(alike: bool, platform: str, world_size: int) -> None:
    for messages in run_distributed(built_without_a_seed, alike, platform=platform, world_size=world_size):
        assert len(messages) == (0 if alike else 1)


NORMS: dict[str, tuple[dict[str, str], list[str]]] = {
    "a norm alone": ({"model.norm": "sequence_parallel"}, ["model.norm"]),
    "its gradient summed": ({"model.norm": "replicated_with_grad_allreduce"}, ["model.norm"]),
    "beside layers on whole activations": (
        {"model.norm": "sequence_parallel", "model.layers.*.mlp.up_proj": "colwise",
         "model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"},
        ["model.norm"],
    ),
    "the whole plan": ({}, []),
}  # fmt: skip
"""Plans, and the norms whose gradients they sum for no visible reason."""


def doubts(case: str) -> list[str]:
    """Warnings of such gradients."""
    import warnings

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    plan: Any = NORMS[case][0] or "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(adapter.module("own_llama", False, 2), adapter.mesh, plan, sequence_parallel=plan == "auto")
    return [str(w.message) for w in caught if "sums the gradients" in str(w.message)]


@on_groups(1, 2)
@pytest.mark.parametrize("case", NORMS)
def test_sums_of_whole_gradients_are_warned(case: str, platform: str, world_size: int) -> None:
    names = NORMS[case][1] if world_size > 1 else []
    for messages in run_distributed(doubts, case, platform=platform, world_size=world_size):
        assert len(messages) == len(names)
        assert all(f"gradients of {', '.join(names)} over" in m and "become 2 times too large" in m for m in messages)


def reasons() -> list[list[str]]:
    """Norms in doubt, of plans that cut a sequence or heads, and of heads elsewhere."""
    from hyper_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, Shard
    from hyper_parallel.tensor_parallel.prepare import SummedGradients
    from hyper_parallel.tensor_parallel.summed import summed_without_parts

    plans = [
        {"norm": SequenceParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1))},
        {"attn.q_norm": SummedGradients(), "attn.q_proj": ColwiseParallel()},
        {"norm": SummedGradients(), "attn.q_proj": ColwiseParallel()},
        {"": SequenceParallel()},
    ]
    return [summed_without_parts({name: (name, style) for name, style in plan.items()}) for plan in plans]


@on_groups(1)
def test_what_cuts_activations(platform: str, world_size: int) -> None:
    assert run_distributed(reasons, platform=platform, world_size=world_size) == [[[], [], ["norm"], []]]
