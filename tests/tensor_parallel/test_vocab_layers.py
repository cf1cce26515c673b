"""Embedding and last layer over a shared vocabulary, against one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.arrays import pieces, values
from tests.tensor_parallel.parts import Part, whole_of

WIDTH = 3


def embed(
    vocab: int, ids: np.ndarray, padding_idx: int | None, upstream: list[np.ndarray], sequence_parallel: bool
) -> Any:
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    layer = VocabParallelEmbedding(
        vocab,
        WIDTH,
        padding_idx,
        group=adapter.mesh,
        sequence_parallel=sequence_parallel,
        dtype=adapter.dtype("float64"),
    )
    adapter.fill(layer.weight, values(vocab, WIDTH))
    return adapter.differentiate(layer, [adapter.tensor(ids, "int64")], [layer.weight], upstream[this_rank()])


@pytest.mark.contract("T3")
@on_groups(1, 2, 4)
@pytest.mark.parametrize("vocab", [5, 2, 251])
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
def test_embedding(platform: str, world_size: int, vocab: int, padding_idx: int | None) -> None:
    """Also with a vocabulary that the ranks do not divide (vllm#440)."""
    for sequence_parallel in (False, True):
        rng = np.random.default_rng(0)
        ids = rng.integers(0, vocab, (2, 9))
        ids[0, :2] = vocab - 1, 1  # the last id, and the padding one
        table = values(vocab, WIDTH)
        upstream = values(2, 9, WIDTH, seed=1)
        gradient = np.zeros_like(table)
        np.add.at(gradient, ids, upstream)
        if padding_idx is not None:
            gradient[padding_idx] = 0

        def laid(a: np.ndarray, sequence_parallel: bool = sequence_parallel) -> list[np.ndarray]:
            return pieces(a, 1, world_size) if sequence_parallel else [a] * world_size

        found = run_distributed(
            embed, vocab, ids, padding_idx, laid(upstream), sequence_parallel, platform=platform, world_size=world_size
        )
        whole = whole_of([result.parameters[0] for result in found])
        np.testing.assert_allclose(whole, gradient, rtol=1e-12, atol=1e-12)
        for rank, result in enumerate(found):
            np.testing.assert_array_equal(result.value, laid(table[ids])[rank])
            collectives = (result.forward, result.backward)
            if world_size == 1:
                assert collectives == ({}, {})
            elif sequence_parallel:
                # whether all ranks have such ids is asked first, on CPU
                assert collectives == ({"reduce_scatter": 1, "all_gather": 1}, {"all_gather": 1})
            else:
                assert collectives == ({"all_reduce": 1, "all_gather": 1}, {})


def owners_of_ids(vocab: int) -> np.ndarray:
    from hyper_parallel.platform.modules import get_module_backend
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    layer = VocabParallelEmbedding(vocab, 1, group=adapter.mesh, dtype=adapter.dtype("float64"))
    adapter.fill(layer.weight, np.ones((vocab, 1)))
    start = layer.rule.cuts["weight"].ranges[this_rank()][0][0]
    ids = adapter.tensor(np.arange(vocab), "int64")
    return adapter.array(get_module_backend().lookup(ids, layer.weight, start, None))[:, 0]


@pytest.mark.contract("T3")
@pytest.mark.parametrize("platform", ["torch", "mindspore"])
@pytest.mark.parametrize(("vocab", "world_size"), [(5, 2), (5, 4), (251, 2), (2, 4)])
def test_every_id_has_one_owner(platform: str, vocab: int, world_size: int) -> None:
    """A floor division once lost the last ids (text-generation-inference#1463)."""
    found = run_distributed(owners_of_ids, vocab, platform=platform, world_size=world_size)
    np.testing.assert_array_equal(sum(found), 1)


def bad_id(bad: int) -> None:
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    VocabParallelEmbedding(5, 2, group=adapter.mesh)(adapter.tensor(np.array([0, bad]), "int64"))


@on_groups(2)
@pytest.mark.parametrize("bad", [5, -1])
def test_an_id_outside_the_table(platform: str, world_size: int, bad: int) -> None:
    for error in run_distributed(bad_id, bad, platform=platform, world_size=world_size, expect_error=True):
        assert error.type == "IndexError" and f"{bad}" in error.message and "5 rows" in error.message


def ids_of_one_rank() -> dict[str, str]:
    """What is raised where the last rank's ids are not those of the others."""
    from hyper_parallel import VocabParallelEmbedding, parallelize_module
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.test_uneven import said

    adapter = this_adapter()
    good, last = adapter.tensor(np.array([[1, 2]]), "int64"), this_rank() == 1
    bad = {
        "outside": adapter.tensor(np.array([[1, 70]]), "int64"),
        "floats": adapter.tensor(np.array([[1.0, 2.0]]), "float32"),
        "shape": adapter.tensor(np.array([[1, 2, 3]]), "int64"),
    }
    layers = {"layer": VocabParallelEmbedding(5, 2, group=adapter.mesh)}
    for style in ("embedding_rowwise", "embedding_colwise"):
        layers[style] = parallelize_module(adapter.module("Tiny"), adapter.mesh, {"embed": style}).embed
    return said({
        f"{where} {what}": lambda layer=layer, ids=ids: layer(ids if last else good)
        for where, layer in layers.items() for what, ids in bad.items()
    })  # fmt: skip


@on_groups(2)
def test_ids_that_are_wrong_on_one_rank_only(platform: str, world_size: int) -> None:
    """The others would wait for it in the sum of the rows."""
    one, other = run_distributed(ids_of_one_rank, platform=platform, world_size=world_size)
    assert one == other
    for call, error in one.items():
        expected = {
            "outside": "IndexError: rank 1: ",
            "floats": "TypeError: rank 1: ",
            "shape": "ValueError: ",
        }[call.split()[1]]
        assert error.startswith(expected), (call, error)
    assert "int64 (1, 2) on rank 0, int64 (1, 3) on rank 1" in one["layer shape"]


def narrow_ids(dtype: str) -> np.ndarray:
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    layer = VocabParallelEmbedding(70_000, 1, group=adapter.mesh)
    adapter.fill(layer.weight, np.arange(70_000, dtype=np.float32)[:, None])
    return adapter.array(layer(adapter.tensor(np.array([3, 120]), dtype)))[:, 0]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_ids_of_a_narrow_dtype(dtype: str) -> None:
    """MindSpore takes them, and where a rank's rows begin does not fit into them. (PyTorch takes int32 and int64.)"""
    for found in run_distributed(narrow_ids, dtype, platform="mindspore", world_size=2):
        np.testing.assert_array_equal(found, [3, 120])


def test_ids_that_are_no_integers() -> None:
    for error in run_distributed(narrow_ids, "float32", platform="mindspore", world_size=2, expect_error=True):
        assert error.type == "TypeError" and "expected an integer dtype" in error.message


def tied_model(tied: bool, gather: bool) -> tuple[np.ndarray, list[Part], bool]:
    """ids -> embedding -> head -> loss, with the head's weight the embedding's, or another."""
    from hyper_parallel import DTensor, loss_parallel
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding, VocabParallelHead
    from tests.tensor_parallel.adapters import this_adapter

    adapter, vocab = this_adapter(), 11
    options: dict[str, Any] = {"group": adapter.mesh, "dtype": adapter.dtype("float64")}
    embedding = VocabParallelEmbedding(vocab, WIDTH, **options)
    head = VocabParallelHead(WIDTH, vocab, tied_to=embedding if tied else None, gather_output=gather, **options)
    for layer in (embedding, head):
        adapter.fill(layer.weight, values(vocab, WIDTH))
    target = adapter.tensor(np.arange(2, 10), "int64")

    def loss(ids: Any) -> Any:
        with loss_parallel():
            logits = head(embedding(ids))
            assert isinstance(logits, DTensor) != gather and tuple(logits.shape) == (8, vocab)
            return adapter.cross_entropy(logits, target)

    parameters = [embedding.weight] if tied else [embedding.weight, head.weight]
    found = adapter.differentiate(loss, [adapter.tensor(np.arange(8), "int64")], parameters)
    return found.value, found.parameters, head.weight is embedding.weight


@on_groups(1, 2, 4)
@pytest.mark.parametrize("gather", [False, True])
def test_tied_head(platform: str, world_size: int, gather: bool) -> None:
    """One vocabulary-sharded weight serves both, with one gradient (torchtitan#2252, transformers#48824)."""
    table, ids, target = values(11, WIDTH), np.arange(8), np.arange(2, 10)
    logits = table[ids] @ table.T
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    p = shifted / shifted.sum(1, keepdims=True)
    grad_logits = (p - np.eye(11)[target]) / 8
    of_head = grad_logits.T @ table[ids]
    of_embedding = np.zeros_like(table)
    np.add.at(of_embedding, ids, grad_logits @ table)
    right = {True: [of_embedding + of_head], False: [of_embedding, of_head]}
    for tied in (True, False):
        found = run_distributed(tied_model, tied, gather, platform=platform, world_size=world_size)
        for loss, _, same in found:
            np.testing.assert_allclose(loss, -np.log(p[np.arange(8), target]).mean(), rtol=1e-12)
            assert same == tied
        for index, gradient in enumerate(right[tied]):
            whole = whole_of([parts[index] for _, parts, _ in found])
            np.testing.assert_allclose(whole, gradient, rtol=1e-9, atol=1e-12)


def misfit() -> None:
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding, VocabParallelHead
    from tests.tensor_parallel.adapters import this_adapter

    embedding = VocabParallelEmbedding(5, 2, group=this_adapter().mesh)
    VocabParallelHead(3, 5, group=this_adapter().mesh, tied_to=embedding)


@on_groups(2)
def test_a_head_that_does_not_fit_the_embedding(platform: str, world_size: int) -> None:
    for error in run_distributed(misfit, platform=platform, world_size=world_size, expect_error=True):
        assert error.type == "ParallelPlanError" and "(5, 2)" in error.message
