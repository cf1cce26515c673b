"""What the workers run for test_random."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.random import agree_on_generator, shard_index
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform import get_platform
from tests.core.op_checks import as_dtensor, check_replicas, close, mesh_of
from tests.core.raising import raises

LAYOUTS: list[list[Placement]] = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(1)],
]
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 0, 1000),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(0, 1),
    "exponential_": lambda x: x.clone().exponential_(),
}


def masks() -> None:
    """The same numbers on ranks that hold the same part, others elsewhere; and others the next time."""
    mesh = mesh_of((2, 2))
    torch.manual_seed(3)
    for placements in LAYOUTS:
        x = distribute_tensor(torch.ones(8, 8, dtype=torch.float64), mesh, placements)
        for name, draw in DRAWS.items():
            where = f"{name} of {x.global_layout.describe()}"
            state = torch.get_rng_state()
            y, again = draw(x), draw(x)
            assert y.placements == x.placements and y.shape == x.shape, where
            check_replicas(y, where)
            full = y.full_tensor()
            assert not torch.equal(full, again.full_tensor()), where
            for m, p in enumerate(placements):
                if isinstance(p, Shard):
                    a, b = full.chunk(2, p.dim) if placements.count(p) == 1 else full.chunk(4, p.dim)[:2]
                    assert not torch.equal(a, b), f"{where}: mesh dim {m} repeats itself"
            torch.set_rng_state(state)
            assert torch.equal(draw(x).to_local(), y.to_local()), f"{where}: the generator's state does not replay it"


def partial_terms() -> None:
    """One mask for all terms of a sum; a drawn tensor is not a sum of drawn tensors."""
    mesh = mesh_of((2, 2))
    full = torch.ones(6, 5, dtype=torch.float64)
    x = as_dtensor(full, mesh, [Partial(), Shard(0)])
    y = F.dropout(x, 0.5)
    assert y.placements == (Partial(), Shard(0))
    values = y.full_tensor().detach()
    assert set(values.round(decimals=6).unique().tolist()) == {0.0, 2.0}
    y.full_tensor().sum().backward()
    close(x.grad.full_tensor(), values, "gradient of dropout")
    drawn = torch.rand_like(x)
    assert drawn.placements == (Replicate(), Shard(0)) and drawn.full_tensor().max() < 1
    raises(UnsupportedOperatorError, "Partial", lambda: x.detach().normal_())


def nothing_drawn() -> None:
    """Where nothing is dropped the generator stays where it is."""
    x = distribute_tensor(torch.ones(4, 4), mesh_of((4,)), [Shard(0)])
    state = torch.get_rng_state()
    for y in (F.dropout(x, 0.5, training=False), F.dropout(x, 0.0), torch.nn.Dropout(0.3).eval()(x)):
        assert torch.equal(y.to_local(), x.to_local())
    assert torch.equal(torch.get_rng_state(), state)
    before = torch.get_rng_state()
    F.dropout(x, 0.5)
    expected = torch.get_rng_state()
    torch.set_rng_state(before)
    get_platform().draw_seed()
    assert torch.equal(torch.get_rng_state(), expected)  # one draw, whatever the shape


def refused() -> None:
    mesh = mesh_of((4,))
    x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)])
    raises(UnsupportedOperatorError, "must be whole", lambda: torch.multinomial(x, 2))
    raises(UnsupportedOperatorError, "generator=", lambda: x.normal_(generator=torch.Generator()))
    rows = torch.multinomial(x.redistribute(placements=[Shard(0)]), 2)
    assert tuple(rows.shape) == (4, 2) and rows.placements == (Shard(0),)
    images = distribute_tensor(torch.ones(2, 3, 4, 4), mesh, [Shard(2)])
    raises(UnsupportedOperatorError, "must be whole", lambda: F.dropout2d(images))


def different_generators() -> None:
    """Ranks that are seeded apart take one seed, once per mesh; ranks seeded alike keep their stream."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(11)
    expected = get_platform().peek_seed()
    assert get_platform().draw_seed() == expected
    torch.manual_seed(11)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("alike", "b"))
    like = torch.zeros(1)
    agree_on_generator(mesh, like)
    assert mesh.generators_agree and get_platform().draw_seed() == expected
    for odd in (0, 3):
        torch.manual_seed(100 + (rank == odd))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"odd{odd}", "b"))  # equal meshes share the answer
        x = distribute_tensor(torch.ones(16), mesh, [Replicate(), Replicate()])
        check_replicas(F.dropout(x, 0.5), f"rank {odd} seeded apart")
        check_replicas(F.dropout(x, 0.5), "the second draw")
    # along one dim of a mesh the others may differ
    torch.manual_seed(rank // 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.ones(64), mesh["tp"], [Replicate()])
    y = F.dropout(x, 0.5)
    check_replicas(y, "tp")
    every = get_platform().all_gather(y.to_local(), mesh.get_group("dp"))
    assert not torch.equal(every[0], every[1])


def shard_indices() -> None:
    mesh = mesh_of((2, 2))
    a, b = mesh.coordinate
    expected = [0, a, b, 2 * a + b, 2 * a + b]
    found = [shard_index(distribute_tensor(torch.ones(4, 4), mesh, p).global_layout) for p in LAYOUTS]
    assert found == expected


def one_rank() -> None:
    """A mesh of one rank works too."""
    mesh: DeviceMesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.ones(100), mesh, [Shard(0)])
    assert set(F.dropout(x, 0.5).to_local().tolist()) == {0.0, 2.0}
