"""What is sent, and what is kept: two collectives forward, none backward, and nothing of the size of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.cases import REDUCTIONS, LossCase, make_case
from tests.conformance.groups import FLOATS, on_groups, on_offers
from tests.conformance.loss_calls import call_loss, context_of, local_logits, logits_of, target_of, weight_of
from tests.harness import run_distributed

_TOKENS = 96
_HEADER = 64  # bytes of the agreement on one mesh dim, at most
Sent = list[tuple[str, int]]


def recorded(case: LossCase) -> tuple[Sent, Sent]:
    """In a worker: what this rank sent in the forward and in the backward pass."""
    adapter = this_adapter()
    local, target, weight = local_logits(case), target_of(case), weight_of(case)
    logits_of(case, local)  # makes the mesh
    forward = []

    with adapter.record_collectives() as seen:

        def loss_of(x: Any) -> Any:
            with context_of(case):
                loss = call_loss(case, logits_of(case, x), target, weight)
            forward.extend(seen)
            return adapter.unwrap(loss)

        adapter.value_and_grad(loss_of, local, case.upstream)
        everything = list(seen)
    sent = [(c.name, c.bytes) for c in everything]
    return sent[: len(forward)], sent[len(forward) :]


def sent_by(platform: str, case: LossCase) -> tuple[Sent, Sent]:
    """The same on all ranks."""
    found = run_distributed(recorded, case, platform=platform, world_size=int(np.prod(case.mesh)))
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.contract("G2")
@on_offers(FLOATS, "dtype", 2, 3, 4)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_two_forward_none_backward(platform: str, world_size: int, dtype: str, reduction: str) -> None:
    """The header of the agreement, then 8 bytes a token (two numbers in the statistics' dtype); no more."""
    bytes_per_token = 16 if dtype == "float64" else 8
    for classes in (40, 400):
        case = make_case(
            world_size, (_TOKENS, classes), dtype=dtype, reduction=reduction, upstream=1.0, weighted=True, ignored=[3]
        )
        forward, backward = sent_by(platform, case)
        assert len(forward) == 2 and backward == []
        (_, header), (name, exchanged) = forward
        assert header <= _HEADER
        assert (name, exchanged) == ("all_gather", bytes_per_token * _TOKENS)


@pytest.mark.contract("G2")
@on_offers({"torch": ("native_function", "native_module")}, "entry", 2)
def test_native_tensors(platform: str, world_size: int, entry: str) -> None:
    """The framework's own distributed tensors send no more."""
    forward, backward = sent_by(platform, make_case(2, (_TOKENS, 40), entry=entry, weighted=True))
    assert backward == []
    assert [name for name, _ in forward] == ["all_gather", "all_gather"]
    assert forward[1][1] == 8 * _TOKENS


@pytest.mark.contract("G2", "P4")
@on_groups(4)
@pytest.mark.parametrize(("reduction", "numbers"), [("none", 0), ("sum", 1), ("mean", 2)])
def test_beside_data_parallel(platform: str, world_size: int, reduction: str, numbers: int) -> None:
    """With tokens on dp a header goes along each mesh dim, and the sums along dp at the end (loss; weight for mean).

    The backward of that reduction is the identity.
    """
    case = make_case(4, (_TOKENS, 40), mesh=(2, 2), shards=(0, 1), reduction=reduction, upstream=1.0)
    forward, backward = sent_by(platform, case)
    assert backward == []
    assert all(size <= _HEADER for _, size in forward[:2])
    assert forward[2] == ("all_gather", 8 * _TOKENS // 2)
    assert forward[3:] == ([("all_reduce", 4 * numbers)] if numbers else [])


@pytest.mark.contract("G2", "P4")
@on_groups(4)
def test_replicated_data_parallel_sends_nothing(platform: str, world_size: int) -> None:
    """Where dp is replicated there is nothing to reduce over it."""
    forward, backward = sent_by(platform, make_case(4, (_TOKENS, 40), mesh=(2, 2), shards=(None, 1)))
    assert [size > _HEADER for _, size in forward] == [False, False, True] and backward == []


@pytest.mark.contract("G2", "K1")
@on_groups(2, 3)
def test_decomposed(platform: str, world_size: int) -> None:
    """log_softmax then nll_loss: its backward needs the sum of the upstream gradient over all classes; no logits go."""
    forward, backward = sent_by(platform, make_case(world_size, (_TOKENS, 400), entry="decomposed"))
    total = sum(size for _, size in forward)
    assert total <= (8 + 4) * _TOKENS + 2 * _HEADER
    assert backward == [("all_reduce", 4 * _TOKENS)]


@pytest.mark.contract("G2", "K3")
@on_groups(1, 2, 4)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_bytes_kept_for_backward(platform: str, world_size: int, reduction: str, weighted: bool) -> None:
    """Beyond an alias of the logits, 16 bytes a token (and the caller's own weights); of bf16 no fp32 copy."""
    for dtype in [d for d in ("float32", "bfloat16") if d in FLOATS[platform]]:
        case = make_case(
            world_size, (_TOKENS, 400), dtype=dtype, reduction=reduction, upstream=1.0, weighted=weighted, ignored=[1]
        )
        for kept in run_distributed(bytes_kept, case, platform=platform, world_size=world_size):
            if kept is None:
                pytest.skip(f"{platform} does not tell what it keeps")
            assert 0 < kept <= 16 * _TOKENS + 64


def bytes_kept(case: LossCase) -> int | None:
    """In a worker: beyond the logits and the weights."""
    adapter = this_adapter()
    target, weight = target_of(case), weight_of(case)

    def loss_of(x: Any) -> Any:
        with context_of(case):
            return adapter.unwrap(call_loss(case, logits_of(case, x), target, weight))

    total = adapter.bytes_kept(loss_of, local_logits(case))
    if total is None or weight is None:
        return total
    return total - adapter.numpy(weight).size * (4 if case.dtype == "float32" else 2)
