"""Embedding and last layer over a shared vocabulary, against one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.arrays import pieces, values
from tests.tensor_parallel.test_layers import set_parameters, whole_gradient

pytestmark = pytest.mark.platform("torch")
WORLD_SIZES = (1, 2, 4)
WIDTH = 3


def embed(
    vocab: int, ids: np.ndarray, padding_idx: int | None, upstream: list[np.ndarray], sequence_parallel: bool
) -> tuple[Any, ...]:
    import torch

    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.torch_workers import array, count_collectives, tensor, tp_mesh

    layer = VocabParallelEmbedding(
        vocab,
        WIDTH,
        padding_idx,
        group=tp_mesh(),
        sequence_parallel=sequence_parallel,
        dtype=torch.float64,
    )
    set_parameters(layer, weight=values(vocab, WIDTH))
    with count_collectives() as forward:
        y = layer(torch.from_numpy(ids))
    with count_collectives() as backward:
        y.backward(tensor(upstream[this_rank()]))
    return array(y), whole_gradient(layer.weight), forward, backward


@pytest.mark.contract("T3")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("vocab", [5, 2, 251])
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
def test_embedding(world_size: int, vocab: int, padding_idx: int | None) -> None:
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
            embed, vocab, ids, padding_idx, laid(upstream), sequence_parallel, world_size=world_size
        )
        for rank, (y, grad, forward, backward) in enumerate(found):
            np.testing.assert_array_equal(y, laid(table[ids])[rank])
            np.testing.assert_allclose(grad, gradient, rtol=1e-12, atol=1e-12)
            if world_size == 1:
                assert (forward, backward) == ({}, {})
            elif sequence_parallel:
                assert (forward, backward) == ({"reduce_scatter": 1}, {"all_gather": 1})
            else:
                assert (forward, backward) == ({"all_reduce": 1}, {})


def owners_of_ids(vocab: int) -> np.ndarray:
    import torch

    from hyper_parallel.platform.modules import get_module_backend
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.torch_workers import array, tp_mesh

    layer = VocabParallelEmbedding(vocab, 1, group=tp_mesh(), dtype=torch.float64)
    set_parameters(layer, weight=np.ones((vocab, 1)))
    start = layer.rule.cuts["weight"].ranges[this_rank()][0][0]
    rows = get_module_backend().lookup(torch.arange(vocab), layer.weight, start, None)
    return array(rows)[:, 0]


@pytest.mark.contract("T3")
@pytest.mark.parametrize(("vocab", "world_size"), [(5, 2), (5, 4), (251, 2), (2, 4)])
def test_every_id_has_one_owner(vocab: int, world_size: int) -> None:
    np.testing.assert_array_equal(sum(run_distributed(owners_of_ids, vocab, world_size=world_size)), 1)


def bad_id(bad: int) -> None:
    import torch

    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.torch_workers import tp_mesh

    VocabParallelEmbedding(5, 2, group=tp_mesh())(torch.tensor([0, bad]))


@pytest.mark.parametrize("bad", [5, -1])
def test_an_id_outside_the_table(bad: int) -> None:
    for error in run_distributed(bad_id, bad, world_size=2, expect_error=True):
        assert error.type == "IndexError" and f"{bad}" in error.message and "5 rows" in error.message


def tied_model(tied: bool, gather: bool) -> tuple[Any, ...]:
    """ids -> embedding -> head -> loss, with the head's weight the embedding's, or another."""
    import torch
    import torch.nn.functional as F

    from hyper_parallel import DTensor, loss_parallel
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding, VocabParallelHead
    from tests.tensor_parallel.torch_workers import array, tp_mesh

    vocab, mesh = 11, tp_mesh()
    embedding = VocabParallelEmbedding(vocab, WIDTH, group=mesh, dtype=torch.float64)
    head = VocabParallelHead(
        WIDTH,
        vocab,
        group=mesh,
        tied_to=embedding if tied else None,
        gather_output=gather,
        dtype=torch.float64,
    )
    set_parameters(embedding, weight=values(vocab, WIDTH))
    if not tied:
        set_parameters(head, weight=values(vocab, WIDTH))
    ids, target = torch.arange(8), torch.arange(2, 10)
    with loss_parallel():
        logits = head(embedding(ids))
        assert isinstance(logits, DTensor) != gather and tuple(logits.shape) == (8, vocab)
        loss = F.cross_entropy(logits, target)
        loss.backward()
    value = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return array(value), whole_gradient(embedding.weight), whole_gradient(head.weight), head.weight is embedding.weight


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("gather", [False, True])
def test_tied_head(world_size: int, gather: bool) -> None:
    table, ids, target = values(11, WIDTH), np.arange(8), np.arange(2, 10)
    logits = table[ids] @ table.T
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    p = shifted / shifted.sum(1, keepdims=True)
    grad_logits = (p - np.eye(11)[target]) / 8
    of_head = grad_logits.T @ table[ids]
    of_embedding = np.zeros_like(table)
    np.add.at(of_embedding, ids, grad_logits @ table)
    right = {True: (of_embedding + of_head,) * 2, False: (of_embedding, of_head)}
    for tied in (True, False):
        for loss, embedding, head, same in run_distributed(tied_model, tied, gather, world_size=world_size):
            np.testing.assert_allclose(loss, -np.log(p[np.arange(8), target]).mean(), rtol=1e-12)
            np.testing.assert_allclose(embedding, right[tied][0], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(head, right[tied][1], rtol=1e-9, atol=1e-12)
            assert same == tied


def misfit() -> None:
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding, VocabParallelHead
    from tests.tensor_parallel.torch_workers import tp_mesh

    embedding = VocabParallelEmbedding(5, 2, group=tp_mesh())
    VocabParallelHead(3, 5, group=tp_mesh(), tied_to=embedding)


def test_a_head_that_does_not_fit_the_embedding() -> None:
    for error in run_distributed(misfit, world_size=2, expect_error=True):
        assert error.type == "ParallelPlanError" and "(5, 2)" in error.message
