"""Built without memory, parallelised, materialised: initial weights that do not depend on the degree, nothing unset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.tensor_parallel.initialize import Normal
from tests.checkpoint.files import write_checkpoint
from tests.harness import run_distributed, this_rank

pytestmark = [pytest.mark.platform("torch"), pytest.mark.contract("S3")]


def initial(kind: str, dtype: str, seed: int) -> dict[str, Any]:
    """The whole initial weights (rank 0's view), gathered from what the ranks hold; logits; buffers; ties."""
    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint import torch_models as models

    model = models.sharded(kind, dtype)
    options = {"initial": {"*": Normal(0.02), "*norm*": Normal(1.0)}} if kind.startswith("own") else {}
    assert materialize(model, seed=seed, **options) is model
    reference = models.build(kind)
    buffers = dict(reference.named_buffers())
    return {
        "parts": models.parts(model),
        "cuts": {
            n: (p._shard_spec.dim, p._shard_spec.ranges, p._shard_spec.shape)
            for n, p in model.named_parameters()
            if getattr(p, "_shard_spec", None) is not None and p._shard_spec.dim is not None
        },
        "logits": models.logits(model),
        "buffers": all(np.array_equal(buffers[n], b) for n, b in model.named_buffers()) and len(buffers),
        "tied": model.lm_head.weight is model.get_parameter(next(iter(models.parts(model)))),
        "std": {n: (float(p.float().std()), float(p.float().mean())) for n, p in reference.named_parameters()},
        "dtypes": {str(p.dtype) for p in model.parameters()},
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


@pytest.mark.parametrize("kind", ["own", "own tied", "llama", "gpt2"])
def test_the_same_bits_at_every_degree(kind: str) -> None:
    if not kind.startswith("own"):
        pytest.importorskip("transformers")
    results = {n: run_distributed(initial, kind, "float32", 7, world_size=n, timeout=90) for n in (1, 2, 4)}
    alone = gathered(results[1])
    for found in results.values():
        whole = gathered(found)
        assert whole.keys() == alone.keys()
        for name, array in whole.items():
            assert array.tobytes() == alone[name].tobytes(), name
        for result in found:
            np.testing.assert_allclose(result["logits"], results[1][0]["logits"], rtol=0, atol=2e-5)
            assert result["tied"] == (kind != "own")
            assert result["buffers"] or kind in ("own", "own tied", "gpt2")
    other = run_distributed(initial, kind, "float32", 8, world_size=1)
    assert np.abs(other[0]["logits"] - results[1][0]["logits"]).max() > 1e-3
    if not kind.startswith("own"):  # the distributions are the model's own
        for name, (std, mean) in results[1][0]["std"].items():
            n = alone[name].size  # both are samples of n: six standard errors of the difference
            assert abs(alone[name].std() - std) < 6 * std / np.sqrt(n) + 1e-6, name
            assert abs(alone[name].mean() - mean) < 6 * std * np.sqrt(2 / n) + 1e-6, name


def test_another_dtype() -> None:
    one, two = (run_distributed(initial, "own", "bfloat16", 7, world_size=n) for n in (1, 2))
    assert one[0]["dtypes"] == {"torch.bfloat16"}
    first, second = gathered(one), gathered(two)
    assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())


def seeds_of_ranks() -> None:
    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint import torch_models as models

    materialize(models.sharded("own"), seed=this_rank(), initial={"*": Normal(0.02)})


def nothing_says_how() -> None:
    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint import torch_models as models

    model = models.sharded("own")
    try:
        materialize(model)
    finally:
        assert all(p.is_meta for p in model.parameters())


def wrong_pattern() -> None:
    from hyper_parallel.tensor_parallel.materialize import materialize
    from tests.checkpoint import torch_models as models

    materialize(models.sharded("own"), initial={"lm_haed*": Normal(0.02)})


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


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (seeds_of_ranks, "ranks see different things: rank 0 'seed 0', rank 1 'seed 1'"),
        (nothing_says_how, "model.norm.weight (nothing in the model's code initialises it)"),
        (wrong_pattern, "initial names 'lm_haed*', but no parameter is called so"),
        (persistent_buffer, "mean.mean (nothing in the model's code initialises it)"),
    ],
)
def test_errors_on_all_ranks(function: Any, text: str) -> None:
    errors = run_distributed(function, world_size=2, expect_error=True)
    assert [e.type for e in errors] == ["CheckpointError"] * 2
    assert len(set(errors)) == 1 and text in errors[0].message


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


def own_layers(world: int) -> dict[str, np.ndarray]:
    import torch
    from torch import nn

    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from hyper_parallel.tensor_parallel.materialize import materialize
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding, VocabParallelHead
    from tests.checkpoint.torch_models import parts
    from tests.tensor_parallel.torch_workers import tp_mesh

    mesh = tp_mesh()
    with torch.device("meta"):
        embedding = VocabParallelEmbedding(7, 6, padding_idx=5, group=mesh)
        model = nn.Sequential(
            embedding,
            ColumnParallelLinear(6, 8, group=mesh),
            RowParallelLinear(8, 6, group=mesh),
            VocabParallelHead(6, 7, group=mesh, tied_to=embedding),
        )
    materialize(model, seed=3)
    assert model[3].weight is model[0].weight
    return parts(model)


def test_the_layers_of_the_library() -> None:
    [alone] = run_distributed(own_layers, 1, world_size=1)
    first, second = run_distributed(own_layers, 2, world_size=2)
    dims = {"0.weight": 0, "1.weight": 0, "1.bias": 0, "2.weight": 1}
    for name, array in alone.items():
        joined = np.concatenate([first[name], second[name]], dims[name]) if name in dims else first[name]
        np.testing.assert_array_equal(joined, array)
    assert not alone["0.weight"][5].any() and alone["0.weight"][4].all()
    assert np.abs(alone["2.weight"]).max() <= 8**-0.5 and np.abs(alone["2.weight"]).max() > 0.9 * 8**-0.5
