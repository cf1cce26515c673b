"""Any shape, dtype, layout, reduction, pattern of ignored tokens and weights: the oracle's loss and gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.cases import REDUCTIONS, LossCase, make_case
from tests.conformance.groups import ENTRIES, FLOATS, TARGET_DTYPES, on_groups
from tests.conformance.loss_calls import check


def _meshes(world_size: int) -> list[tuple[int, ...]]:
    """All ways to lay the ranks out in one or two dims."""
    pairs = [(a, world_size // a) for a in range(1, world_size + 1) if world_size % a == 0]
    return [(world_size,), *pairs]


@st.composite
def calls(draw: st.DrawFn, platform: str, world_size: int) -> LossCase:
    """A legal call."""
    classes = draw(st.integers(1, 14))
    token_dims = draw(st.lists(st.integers(0, 4), max_size=3))
    shape = (classes,) if not token_dims else (token_dims[0], classes, *token_dims[1:])
    class_dim = 0 if len(shape) == 1 else 1
    mesh = draw(st.sampled_from(_meshes(world_size)))
    class_mesh_dim = draw(st.integers(0, len(mesh) - 1))
    shards: list[int | None] = [None] * len(mesh)
    shards[class_mesh_dim] = class_dim
    if len(mesh) == 2 and token_dims:
        other = [d for d in range(len(shape)) if d != class_dim]
        shards[1 - class_mesh_dim] = draw(st.sampled_from([None, *other]))
    tokens = int(np.prod(token_dims, initial=1))
    ignore_index = draw(st.sampled_from([-100, -1, 0, 100]))
    target_dtype = draw(st.sampled_from(TARGET_DTYPES[platform]))
    if target_dtype.startswith("u"):
        ignore_index = 100
    ignored = draw(st.lists(st.integers(0, tokens - 1), max_size=tokens, unique=True)) if tokens else []
    dtype = draw(st.sampled_from(FLOATS[platform]))
    reduction = draw(st.sampled_from(REDUCTIONS))
    fields: dict[str, Any] = {} if reduction == "none" else {"upstream": draw(st.sampled_from([1.0, 0.25, -3.0]))}
    case = make_case(
        world_size,
        shape,
        mesh=mesh,
        shards=shards,
        dtype=dtype,
        weighted=draw(st.booleans()),
        ignored=ignored,
        seed=draw(st.integers(0, 2**20)),
        spread=draw(st.sampled_from([0.0, 0.5, 4.0, 40.0])),
        shift=draw(st.sampled_from([0.0, 0.0, 100.0, -1000.0])),
        target_dtype=target_dtype,
        ignore_index=ignore_index,
        reduction=reduction,
        **fields,
    )
    replicated = case.token_shards == (None,) * len(mesh)
    target_as = draw(st.sampled_from(["plain", "replicated", "sharded", *(["local"] if not replicated else [])]))
    ours = [entry for entry in ENTRIES[platform] if not entry.startswith("native")]
    if dtype == "float64" or dtype == "float32":
        entry = draw(st.sampled_from(ours))
    else:  # the decomposed loss rounds the log-probabilities to half precision in between, as its user asked for
        entry = draw(st.sampled_from([entry for entry in ours if not entry.startswith("decomposed")]))
    if platform == "mindspore" and entry == "module" and dtype in ("float64", "bfloat16"):
        entry = "function"  # nn.CrossEntropyLoss itself refuses these dtypes
    masked = draw(st.lists(st.integers(0, classes - 1), max_size=classes - 1, unique=True))
    if masked and tokens:
        logits = case.logits.copy()
        hit = np.isin(np.arange(classes), masked)
        own = np.moveaxis(logits, class_dim, -1)  # a view: a class is masked where it is no token's target
        own[..., hit] = np.where(case.target[..., None] == np.flatnonzero(hit), own[..., hit], -np.inf)
        case = case.but(logits=logits)
    return case.but(target_as=target_as, entry=entry, weight_as=draw(st.sampled_from(["plain", "replicated"])))


@pytest.mark.contract("G1", "P1", "P2", "P3", "P4", "K1", "K2", "K3")
@on_groups()
@given(data=st.data())
def test_any_call(platform: str, world_size: int, data: st.DataObject) -> None:
    """2,000 examples for each number of ranks in the nightly profile, the same few by default."""
    check(platform, data.draw(calls(platform, world_size)))
