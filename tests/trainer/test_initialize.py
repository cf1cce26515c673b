"""Initial weights: the same whole tensor however it is cut, and a good random one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.tensor_parallel import initialize
from hyper_parallel.tensor_parallel.cuts import cut_parts
from hyper_parallel.tensor_parallel.initialize import Constant, Initializer, Normal, Uniform, draw_shard

NORMAL = Normal(0.02)


def whole(shape: tuple[int, ...], name: str = "w", initializer: Initializer = NORMAL, seed: int = 0) -> np.ndarray:
    return draw_shard(name, ShardSpec.replicated(shape, 1), 0, initializer, seed)


@given(
    shape=st.lists(st.integers(0, 300), min_size=1, max_size=3).filter(lambda s: np.prod(s) < 200_000),
    dim=st.integers(0, 2),
    ranks=st.integers(1, 9),
    initializer=st.sampled_from([NORMAL, Uniform(0.5), Constant(1.5)]),
)
def test_shards_are_pieces_of_one_tensor(shape: list[int], dim: int, ranks: int, initializer: Initializer) -> None:
    dim %= len(shape)
    spec = ShardSpec.chunk(tuple(shape), dim, ranks)
    shards = [draw_shard("w", spec, rank, initializer, 5) for rank in range(ranks)]
    assert [s.shape for s in shards] == [spec.local_shape(rank) for rank in range(ranks)]
    np.testing.assert_array_equal(np.concatenate(shards, dim), whole(tuple(shape), "w", initializer, 5))


def test_fused_parts_are_cut_on_their_own() -> None:
    full = whole((300, 20))
    spec = cut_parts((300, 20), 0, (200, 50, 50), (None, None, None), 2)
    expected = np.concatenate([full[100:200], full[225:250], full[275:300]])
    np.testing.assert_array_equal(draw_shard("w", spec, 1, NORMAL, 0), expected)


def test_tensors_tiles_and_seeds_differ() -> None:
    base = whole((256, 256))
    assert base.dtype == np.float32
    tiles = [base[:128, :128], base[:128, 128:], base[128:, :128], base[128:, 128:]]
    others = [*tiles, whole((128, 128), name="v"), whole((128, 128), seed=1)]
    for i, a in enumerate(others):
        for b in others[i + 1 :]:
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05  # 6 standard deviations


def test_the_distribution_is_the_one_asked_for() -> None:
    normal = whole((1000, 700))
    assert abs(normal.mean()) < 1e-4 and abs(normal.std() - 0.02) < 1e-4
    assert np.abs(normal).max() > 4 * 0.02
    uniform = whole((1000, 700), initializer=Uniform(0.5))
    assert uniform.min() >= -0.5 and uniform.max() < 0.5 and abs(uniform.std() - 0.5 / np.sqrt(3)) < 1e-3


def test_a_rank_draws_only_the_tiles_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []

    class Counting(Normal):
        def fill(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
            drawn.append(shape)
            return super().fill(generator, shape)

    edge = initialize._TILE
    spec = ShardSpec.chunk((8 * edge, 3 * edge), 0, 4)
    draw_shard("w", spec, 2, Counting(1.0), 0)
    assert drawn == [(edge, edge)] * 6


def test_a_scalar_and_a_negative_seed() -> None:
    assert whole(()).shape == ()
    with pytest.raises(ValueError, match="found -1"):
        whole((2,), seed=-1)
