"""Initial weights of the layers: parts of one whole, whatever the number of ranks and the platform."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness import run_distributed
from tests.tensor_parallel.arrays import pieces


def initial_weights() -> dict[str, np.ndarray]:
    from hyper_parallel import get_platform
    from hyper_parallel.platform.modules import get_module_backend
    from hyper_parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from hyper_parallel.tensor_parallel.vocab_layers import VocabParallelEmbedding
    from tests.tensor_parallel.adapters import this_adapter

    get_platform().set_seed(7)
    mesh = this_adapter().mesh
    made = {
        "column": ColumnParallelLinear(130, 200, group=mesh),
        "row": RowParallelLinear(130, 200, group=mesh),
        "embedding": VocabParallelEmbedding(251, 20, 3, group=mesh),
    }
    return {
        f"{name}.{own}": this_adapter().array(p)
        for name, layer in made.items()
        for own, p in get_module_backend().own_parameters(layer).items()
    }


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_initial_weights_do_not_depend_on_the_ranks(platform: str) -> None:
    (alone,) = run_distributed(initial_weights, platform=platform, world_size=1, timeout=60.0)
    for world_size in (2, 4):
        found = run_distributed(initial_weights, platform=platform, world_size=world_size, timeout=60.0)
        for name, whole in alone.items():
            if name == "row.bias":
                parts = [whole] * world_size
            else:
                parts = pieces(whole, 1 if name == "row.weight" else 0, world_size)
            for rank, part in enumerate(parts):
                np.testing.assert_array_equal(found[rank][name], part)
    np.testing.assert_array_equal(alone["embedding.weight"][3], 0)
    bound = 1 / np.sqrt(130)
    assert 0.99 * bound < np.abs(alone["column.weight"]).max() <= bound
