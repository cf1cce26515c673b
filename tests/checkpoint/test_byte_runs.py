"""Runs of bytes against NumPy slices of whole tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.tensor_parallel.byte_runs import ByteRuns, box_runs, owned_runs, spec_runs, uncovered_elements
from hyper_parallel.tensor_parallel.cuts import cut_parts

ITEM = 4


@st.composite
def specs(draw: Any) -> ShardSpec:
    """Chunks, fused parts, heads that several ranks hold, and whole tensors."""
    ranks = draw(st.integers(1, 4))
    shape = list(draw(st.lists(st.integers(0, 6), min_size=0, max_size=3)))
    kind = draw(st.sampled_from(["whole", "chunk", "fused", "heads"]))
    if kind == "whole" or not shape:
        return ShardSpec.replicated(tuple(shape), ranks)
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "chunk":
        return ShardSpec.chunk(tuple(shape), dim, ranks)
    if kind == "fused":
        parts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        shape[dim] = sum(parts)
        return cut_parts(shape, dim, parts, [None] * len(parts), ranks)
    width = draw(st.integers(1, 3))
    shape[dim] = (ranks + 2) * width  # a query head for each rank, one key and one value head for all
    return cut_parts(shape, dim, (ranks * width, width, width), (ranks, 1, 1), ranks)


def whole_of(spec: ShardSpec) -> np.ndarray:
    return np.arange(int(np.prod(spec.shape)), dtype=np.int32).reshape(spec.shape)


def gather(raw: bytes, runs: ByteRuns) -> bytes:
    return b"".join(raw[f : f + n] for f, n in zip(runs.file, runs.length))


def part_of(spec: ShardSpec, rank: int) -> bytes:
    pieces = [whole_of(spec)[index] for index in spec.slices(rank)]
    return (np.concatenate(pieces, spec.dim) if spec.dim is not None else pieces[0]).tobytes()


@given(specs())
def test_runs_give_what_a_rank_holds(spec: ShardSpec) -> None:
    raw = whole_of(spec).tobytes()
    for rank in range(spec.num_ranks):
        runs = spec_runs(spec, rank, ITEM)
        assert gather(raw, runs) == part_of(spec, rank)
        assert (runs.length > 0).all()


@given(specs(), st.data())
def test_owned_runs_cover_the_whole_once(spec: ShardSpec, data: st.DataObject) -> None:
    raw = whole_of(spec).tobytes()
    seen = np.zeros(len(raw), int)
    start = data.draw(st.integers(0, len(raw)))
    stop = data.draw(st.integers(start + 1, len(raw) + 1))
    for rank in range(spec.num_ranks):
        runs, local = owned_runs(spec, rank, ITEM), part_of(spec, rank)
        for f, at, n in zip(runs.file, runs.local, runs.length):
            seen[f : f + n] += 1
            assert raw[f : f + n] == local[at : at + n]
        inside = runs.within(start, stop)
        for f, at, n in zip(inside.file, inside.local, inside.length):
            assert n > 0 and raw[start + f : start + f + n] == local[at : at + n]
        overlap = np.minimum(runs.file + runs.length, stop) - np.maximum(runs.file, start)
        assert inside.total == overlap.clip(min=0).sum()
    assert (seen == 1).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=3))
def test_boxes(dims: list[tuple[int, int, int]]) -> None:
    shape = tuple(max(d) for d in dims)
    bounds = [tuple(sorted(d)[:2]) for d in dims]
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    box = whole[tuple(slice(*b) for b in bounds)]
    assert gather(whole.tobytes(), box_runs(shape, bounds, ITEM)) == box.tobytes()  # type: ignore[arg-type]


def test_elements_that_no_rank_holds() -> None:
    assert uncovered_elements(ShardSpec((6, 5), 0, (((0, 2),), ((3, 6),)))) == 5
    assert uncovered_elements(ShardSpec.chunk((6, 5), 0, 4)) == 0


def test_rows_are_one_run_and_columns_one_for_each_row() -> None:
    assert len(spec_runs(ShardSpec.chunk((8, 6), 0, 2), 1, ITEM)) == 1
    assert len(spec_runs(ShardSpec.chunk((8, 6), 1, 2), 1, ITEM)) == 8
    assert len(spec_runs(cut_parts((8, 6), 0, (4, 4), (None, None), 2), 1, ITEM)) == 2
