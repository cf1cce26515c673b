"""Gradients of weights that several ranks hold: sums over those ranks, whatever else a rank holds."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.tensor_parallel.cuts import cut_parts
from tests.harness import run_distributed

WIDTH = 3


def summed(heads: int, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A fused weight of 8 query heads and ``heads`` key heads of two rows: the sum, and the same by hand."""
    from hyper_parallel import get_platform, init_device_mesh
    from hyper_parallel.tensor_parallel.replicas import make_replica_sum

    platform = get_platform()
    group = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)).get_group("tp")
    spec = cut_parts((16 + 2 * heads, WIDTH), 0, (16, 2 * heads), (8, heads), world_size)
    grads = []
    for ranges in spec.ranges:
        rows = sum(stop - start for start, stop in ranges)
        grads.append(np.random.default_rng([heads, len(grads)]).normal(size=(rows, WIDTH)))
    total = make_replica_sum(spec, group)
    own = platform.from_numpy(grads[group.rank])
    found = platform.to_numpy(total._sum(own)) if total is not None else grads[group.rank]

    expected = []
    for index, (first, last) in enumerate(spec.ranges[group.rank]):
        terms = []
        for grad, ranges in zip(grads, spec.ranges):
            if ranges[index] == (first, last):
                offset = sum(stop - begin for begin, stop in ranges[:index])
                terms.append(grad[offset : offset + last - first])
        expected.append(sum(terms))
    return found, np.concatenate(expected)


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_sums_of_replicas(platform: str, heads: int) -> None:
    """One head on all four ranks, two on two each, and one or two heads that nobody shares."""
    for found, expected in run_distributed(summed, heads, 4, platform=platform, world_size=4):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
