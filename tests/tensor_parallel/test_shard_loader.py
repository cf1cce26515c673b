"""Loaders and their registry: what each rank reads, and what is refused."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.tensor_parallel import shard_loader
from hyper_parallel.tensor_parallel.cuts import cut_parts, owned_ranges, range_replicas
from hyper_parallel.tensor_parallel.shard_loader import (
    DimShardLoader,
    FusedShardLoader,
    HeadShardLoader,
    ParallelRule,
    ReplicateLoader,
    ShardLoader,
    loader_kinds,
    make_loader,
    register_loader,
)
from tests.tensor_parallel.arrays import pieces, values

pytestmark = pytest.mark.platform("torch")


class Handle:
    """Slices of an array, as safetensors gives them: an out-of-range slice is clamped. Counts the elements read."""

    def __init__(self, array: np.ndarray, announced: tuple[int, ...] | None = None) -> None:
        self.array, self.announced, self.read = array, announced, 0

    def get_shape(self) -> list[int]:
        return list(self.announced or self.array.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self.array[index]
        self.read += part.size
        return part


@pytest.mark.contract("S1")
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_dim_loader_reads_chunks_and_nothing_else(ranks: int) -> None:
    whole = values(5, 6)
    for dim in (0, 1, -1):
        for rank, part in enumerate(pieces(whole, dim, ranks)):
            handle = Handle(whole)
            found = DimShardLoader(dim).load(handle, rank, ranks)
            np.testing.assert_array_equal(found, part)
            assert found.flags.c_contiguous and not np.shares_memory(found, whole)
            assert handle.read <= max(part.size, whole.size // whole.shape[dim])


@pytest.mark.contract("S1")
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_replicate_loader(shape: tuple[int, ...]) -> None:
    whole = values(*shape)
    for rank in range(2):
        found = ReplicateLoader().load(Handle(np.asarray(whole)), rank, 2)
        np.testing.assert_array_equal(found, whole)
        assert not np.shares_memory(found, whole)
    assert isinstance(ReplicateLoader(), ShardLoader)


@pytest.mark.contract("S2")
def test_factories() -> None:
    cases = {
        ("column", ".weight"): DimShardLoader(0),
        ("column", ".bias"): DimShardLoader(0),
        ("row", ".weight"): DimShardLoader(1),
        ("row", ".bias"): ReplicateLoader(),
        ("vocab_embed", ".weight"): DimShardLoader(0),
        ("column_embed", ".weight"): DimShardLoader(1),
        ("replicate", ".weight"): ReplicateLoader(),
    }
    for (kind, suffix), expected in cases.items():
        assert make_loader(ParallelRule(kind), suffix) == expected
    stored_in_out = {"column": 1, "row": 0}
    for kind, dim in stored_in_out.items():
        assert make_loader(ParallelRule(kind, transposed=True), ".weight") == DimShardLoader(dim)
    assert make_loader(ParallelRule("column", transposed=True), ".bias") == DimShardLoader(0)


def test_fused_parts_are_cut_on_their_own() -> None:
    q, k, v = values(8, 3), values(4, 3, seed=1), values(4, 3, seed=2)
    rule = ParallelRule("fused_column", (8, 4, 4))
    for rank in range(2):
        found = make_loader(rule, ".weight").load(Handle(np.concatenate([q, k, v])), rank, 2)
        own = [pieces(part, 0, 2)[rank] for part in (q, k, v)]
        np.testing.assert_array_equal(found, np.concatenate(own))


def test_key_value_heads_on_more_ranks() -> None:
    whole = values(2 * 5, 3)
    loader = make_loader(ParallelRule("head_column", heads=(2,)), ".weight")
    for rank in range(4):
        head = rank // 2
        np.testing.assert_array_equal(loader.load(Handle(whole), rank, 4), whole[5 * head : 5 * head + 5])
    spec = HeadShardLoader(0, 2).spec((10, 3), 4)
    assert spec.sum_replica_gradients and [spec.owner(r) for r in range(4)] == [0, 0, 2, 2]


def test_fused_heads_of_which_some_are_on_several_ranks() -> None:
    spec = FusedShardLoader(0, (16, 4, 4), (8, 2, 2)).spec((24, 3), 4)
    assert spec.ranges[3] == ((12, 16), (18, 20), (22, 24))
    assert range_replicas(spec, 3) == ((3,), (2, 3), (2, 3))
    assert owned_ranges(spec, 3) == ((0, 4),) and owned_ranges(spec, 2) == ((0, 4), (4, 6), (6, 8))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 8))
def test_every_element_is_owned_once(key_values: int, group: int, power: int, width: int, plain: int) -> None:
    ranks = 2**power
    if (key_values * group) % ranks or (key_values % ranks and ranks % key_values):
        return
    parts = (key_values * group * width, key_values * width, plain)
    spec = cut_parts((sum(parts),), 0, parts, (key_values * group, key_values, None), ranks)
    counts = np.zeros(sum(parts))
    for rank in range(ranks):
        index = np.concatenate([np.arange(*r) for r in spec.ranges[rank]])
        for start, stop in owned_ranges(spec, rank):
            counts[index[start:stop]] += 1
    np.testing.assert_array_equal(counts, 1)


@pytest.mark.contract("S2")
def test_a_kind_in_a_file_of_its_own() -> None:
    name = "tests.tensor_parallel.fp8_loader"
    try:
        importlib.import_module(name)
        assert "column_fp8" in loader_kinds()
        found = make_loader(ParallelRule("column_fp8"), ".weight").load(Handle(values(4, 2)), 1, 2)
        np.testing.assert_array_equal(found, values(4, 2)[2:])
        with pytest.raises(ParallelPlanError, match=r"'column_fp8' is already registered.*'vocab_embed'"):
            register_loader("column_fp8")(lambda rule, suffix: ReplicateLoader())
    finally:
        shard_loader._registry.pop("column_fp8", None)
        importlib.sys.modules.pop(name, None)  # type: ignore[attr-defined]


@pytest.mark.contract("S2")
def test_an_unknown_kind() -> None:
    with pytest.raises(ParallelPlanError, match=r"no loader of kind 'colunm'.*'column'.*'row'"):
        make_loader(ParallelRule("colunm"), ".weight")


@pytest.mark.parametrize(
    ("loader", "handle", "rank", "text"),
    [
        (DimShardLoader(0), Handle(values(4, 2)), 2, "rank 2 is outside a group of 2"),
        (DimShardLoader(2), Handle(values(4, 2)), 0, r"dim 2 of a tensor of shape \(4, 2\)"),
        (HeadShardLoader(0, 3), Handle(values(6, 2)), 0, "3 heads .* 2 tensor-parallel ranks"),
        (HeadShardLoader(0, 4), Handle(values(6, 2)), 0, "6 elements cannot be made of 4"),
        (FusedShardLoader(0, (3, 2)), Handle(values(6, 2)), 0, "add up to 5"),
        (DimShardLoader(0), Handle(values(3, 2), announced=(6, 2)), 1, r"read a tensor of shape \(0, 2\)"),
    ],
)
def test_misuse(loader: Any, handle: Handle, rank: int, text: str) -> None:
    with pytest.raises(ParallelPlanError, match=text):
        loader.load(handle, rank, 2)


@pytest.mark.contract("S1")
@pytest.mark.parametrize("framework", ["pt", "numpy"])
def test_safetensors(tmp_path: Any, framework: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    whole = values(5, 6).astype(np.float32)
    save_file({"w": whole, "scalar": np.full((), 3, np.float32)}, tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", framework) as file:
        for ranks in (2, 4, 7):
            for dim in (0, 1):
                for rank, part in enumerate(pieces(whole, dim, ranks)):
                    found = DimShardLoader(dim).load(file.get_slice("w"), rank, ranks)
                    np.testing.assert_array_equal(np.asarray(found), part)
        assert float(ReplicateLoader().load(file.get_slice("scalar"), 0, 2)) == 3


def test_description_matches_what_the_loader_reads() -> None:
    loader = FusedShardLoader(1, (4, 4))
    whole = values(3, 8)
    for rank in range(2):
        spec: ShardSpec = loader.spec((3, 8), 2)
        expected = np.concatenate([whole[i] for i in spec.slices(rank)], 1)
        np.testing.assert_array_equal(loader.load(Handle(whole), rank, 2), expected)
