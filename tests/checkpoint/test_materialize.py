"""Built without memory, parallelised, materialised: initial weights that do not depend on the degree or the backend,
nothing unset.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from hyper_parallel.tensor_parallel.initialize import Normal
from tests.checkpoint.own_model import parts, this_models, without_values
from tests.harness import run_distributed, this_rank

pytestmark = pytest.mark.contract("S3")

GIVEN = {"*": Normal(0.02), "*norm*": Normal(1.0)}
GOLDEN = {
    ("own", "float32"): "9e6f6b970cdc0eed8e0c9983a896ac0a9ba1f0b4ec48aa1892204e4fbac0316f",
    ("own tied", "float32"): "7e0e33063af1ec9b13f124455da5392502787299e81ccd6a83eccfb2f7fca1cc",
    ("own", "bfloat16"): "22262b3f791ab35e9ed0ccf836b871451fa9b062a542387f801b40171516580d",
    ("own", "its own"): "4ab353ac649b24210ce5395b3bd643bf3f9e2018fc5299f626da5c9f14d62881",
}
"""SHA-256 of the whole weights drawn with seed 7, by kind and dtype; the same on every platform and at every degree."""

KINDS = [("torch", "own"), ("torch", "own tied"), ("torch", "llama"), ("torch", "gpt2")]
KINDS += [("mindspore", "own"), ("mindspore", "own tied")]


def initial(kind: str, dtype: str, seed: int, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """What this rank holds of the initial weights, and how it is cut; logits; ties."""
    from hyper_parallel.tensor_parallel.materialize import materialize

    models = this_models()
    model = models.sharded(kind, dtype)
    assert without_values(model)
    assert materialize(model, seed=seed, initial=given) is model
    parameters = models.named_parameters(model)
    return {
        "parts": parts(model),
        "cuts": {
            n: (p._shard_spec.dim, p._shard_spec.ranges, p._shard_spec.shape)
            for n, p in parameters.items()
            if getattr(p, "_shard_spec", None) is not None and p._shard_spec.dim is not None
        },
        "logits": models.logits(model) if dtype == "float32" else None,
        "tied": models.head(model) is models.embedding(model),
        "dtypes": {models.dtype_name(p) for p in parameters.values()},
    }


def gathered(found: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    whole = {}
    for name, part in found[0]["parts"].items():
        if name not in found[0]["cuts"]:
            assert all(r["parts"][name].tobytes() == part.tobytes() for r in found), name
            whole[name] = part
            continue
        dim, ranges, shape = found[0]["cuts"][name]
        out = np.full(shape, np.nan, np.float32)
        for result, own in zip(found, ranges):
            index = np.concatenate([np.arange(*r) for r in own])
            place = (slice(None),) * dim + (index,)
            assert np.isnan(out[place]).all() or np.array_equal(out[place], result["parts"][name])  # replicas are equal
            out[place] = result["parts"][name]
        whole[name] = out
    return whole


def digest(whole: dict[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in sorted(whole):
        total.update(f"{name} {whole[name].shape}\n".encode() + whole[name].tobytes())
    return total.hexdigest()


@pytest.mark.parametrize(("platform", "kind"), KINDS)
def test_the_same_bits_at_every_degree(platform: str, kind: str) -> None:
    own = kind.startswith("own")
    if not own:
        pytest.importorskip("transformers")
    options = {"platform": platform, "timeout": 90, "given": GIVEN if own else None}
    results = {n: run_distributed(initial, kind, "float32", 7, world_size=n, **options) for n in (1, 2, 4)}
    alone = gathered(results[1])
    if own:
        assert digest(alone) == GOLDEN[kind, "float32"]
    for found in results.values():
        whole = gathered(found)
        assert whole.keys() == alone.keys()
        for name, array in whole.items():
            assert array.tobytes() == alone[name].tobytes(), name
        for result in found:
            np.testing.assert_allclose(result["logits"], results[1][0]["logits"], rtol=0, atol=2e-5)
            assert result["tied"] == (kind != "own")
    other = run_distributed(initial, kind, "float32", 8, world_size=1, **options)
    assert np.abs(other[0]["logits"] - results[1][0]["logits"]).max() > 1e-3


def unset_forward(kind: str) -> None:
    models = this_models()
    models.logits(models.sharded(kind))


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_the_forward_of_a_model_without_values(platform: str) -> None:
    """On every rank, before anybody waits for another; PyTorch itself would go on with tensors without values."""
    for error in run_distributed(unset_forward, "own", platform=platform, world_size=2, expect_error=True):
        assert error.type == "RuntimeError" and "call materialize(model)" in error.message
        assert error.message.startswith("model.embed_tokens.weight of local shape (12")


def buffers_and_distributions(kind: str) -> dict[str, Any]:
    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint import torch_models as models

    model, reference = materialize(models.sharded(kind), seed=7), models.build(kind)
    buffers = dict(reference.named_buffers())
    return {
        "buffers": all(np.array_equal(buffers[n], b) for n, b in model.named_buffers()),
        "std": {n: (float(p.std()), float(p.mean())) for n, p in reference.named_parameters()},
        "parts": parts(model),
    }


@pytest.mark.platform("torch")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_distributions_and_buffers_are_the_models_own(kind: str) -> None:
    pytest.importorskip("transformers")
    [found] = run_distributed(buffers_and_distributions, kind, world_size=1, timeout=60)
    assert found["buffers"]
    for name, (std, mean) in found["std"].items():
        drawn, n = found["parts"][name], found["parts"][name].size
        # both are samples of n: six standard errors of the difference
        assert abs(drawn.std() - std) < 6 * std / np.sqrt(n) + 1e-6, name
        assert abs(drawn.mean() - mean) < 6 * std * np.sqrt(2 / n) + 1e-6, name


def test_another_dtype(platform: str) -> None:
    one, two = (
        run_distributed(initial, "own", "bfloat16", 7, GIVEN, platform=platform, world_size=n, timeout=60)
        for n in (1, 2)
    )
    assert one[0]["dtypes"] == {"bfloat16"}
    first, second = gathered(one), gathered(two)
    assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())
    assert digest(first) == GOLDEN["own", "bfloat16"]


def test_what_the_layers_say(platform: str) -> None:
    """Embeddings and linear layers of either framework begin alike; norms are given a distribution."""
    found = run_distributed(initial, "own", "float32", 7, {"*norm*": Normal(1.0)}, platform=platform, world_size=2)
    assert digest(gathered(found)) == GOLDEN["own", "its own"]


def seeds_of_ranks() -> None:
    from hyper_parallel.tensor_parallel.materialize import materialize

    materialize(this_models().sharded("own"), seed=this_rank(), initial={"*": Normal(0.02)})


def nothing_says_how() -> None:
    from hyper_parallel.tensor_parallel.materialize import materialize

    model = this_models().unknown_draws()
    try:
        materialize(model)
    finally:
        assert without_values(model)


def wrong_pattern() -> None:
    from hyper_parallel.tensor_parallel.materialize import materialize

    materialize(this_models().sharded("own"), initial={"lm_haed*": Normal(0.02)})


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (seeds_of_ranks, "ranks see different things: rank 0 'seed 0', rank 1 'seed 1'"),
        (nothing_says_how, "these would be left without values: strange ("),
        (wrong_pattern, "initial names 'lm_haed*', but no parameter is called so"),
    ],
)
def test_errors_on_all_ranks(function: Any, text: str, platform: str) -> None:
    errors = run_distributed(function, platform=platform, world_size=2, expect_error=True)
    assert [e.type for e in errors] == ["CheckpointError"] * 2
    assert len(set(errors)) == 1 and text in errors[0].message


def own_layers() -> dict[str, np.ndarray]:
    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from hyper_parallel.tensor_parallel.materialize import materialize
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding, VocabParallelHead

    models = this_models()
    mesh = models.tp_mesh()
    with models.without_memory():
        embedding = VocabParallelEmbedding(7, 6, padding_idx=5, group=mesh)
        model = models.sequence(
            embedding,
            ColumnParallelLinear(6, 8, group=mesh),
            RowParallelLinear(8, 6, group=mesh),
            VocabParallelHead(6, 7, group=mesh, tied_to=embedding),
        )
    assert without_values(model)
    materialize(model, seed=3)
    assert model[3].weight is model[0].weight
    return parts(model)


def test_the_layers_of_the_library(platform: str) -> None:
    [alone] = run_distributed(own_layers, platform=platform, world_size=1)
    first, second = run_distributed(own_layers, platform=platform, world_size=2)
    dims = {"0.weight": 0, "1.weight": 0, "1.bias": 0, "2.weight": 1}
    for name, array in alone.items():
        joined = np.concatenate([first[name], second[name]], dims[name]) if name in dims else first[name]
        np.testing.assert_array_equal(joined, array)
    assert not alone["0.weight"][5].any() and alone["0.weight"][4].all()
    assert np.abs(alone["2.weight"]).max() <= 8**-0.5 and np.abs(alone["2.weight"]).max() > 0.9 * 8**-0.5
