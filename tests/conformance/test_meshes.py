"""Meshes of several dims: classes on one, tokens on others; every reduction is over the whole mesh, once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.cases import REDUCTIONS, make_case
from tests.conformance.groups import NATIVE_ENTRIES, on_groups, on_offers
from tests.conformance.loss_calls import check

reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])

# mesh dims (dp, tp) and what each shards of logits (N, C): 0 the tokens, 1 the classes, None nothing
_TWO_DIMS = {
    "2x2": ((2, 2), (0, 1)),
    "2x2 dp replicated": ((2, 2), (None, 1)),
    "1x4": ((1, 4), (0, 1)),
    "4x1": ((4, 1), (0, 1)),
    "2x2 classes on the first dim": ((2, 2), (1, 0)),
    "2x2 nothing but classes on the first dim": ((2, 2), (1, None)),
}
meshes = pytest.mark.parametrize(("mesh", "shards"), _TWO_DIMS.values(), ids=_TWO_DIMS)


@pytest.mark.contract("P4", "TRAP9", "G1")
@on_groups(4)
@meshes
@reductions
@weights
def test_two_dims(
    platform: str,
    world_size: int,
    mesh: tuple[int, ...],
    shards: tuple[int | None, ...],
    reduction: str,
    weighted: bool,
) -> None:
    """Unequal numbers of valid tokens; a replicated dim counts once; every rank shows the value."""
    case = make_case(
        world_size, (6, 7), mesh=mesh, shards=shards, reduction=reduction, weighted=weighted, ignored=[0, 1]
    )
    check(platform, case)
    check(platform, case.but(entry="decomposed"))


@pytest.mark.contract("P4", "P1")
@on_offers(NATIVE_ENTRIES, "entry", 4)
@reductions
def test_native_tensors(platform: str, world_size: int, entry: str, reduction: str) -> None:
    """The framework's own distributed tensors on a mesh of two dims."""
    case = make_case(world_size, (6, 7), mesh=(2, 2), shards=(0, 1), reduction=reduction, weighted=True, ignored=[0, 1])
    check(platform, case.but(entry=entry, target_as="sharded"))
    check(platform, case.but(entry=entry))


@pytest.mark.contract("P4", "P1")
@on_groups(2, 4)
@pytest.mark.parametrize("target_as", ["plain", "local", "sharded", "replicated"])
def test_targets(platform: str, world_size: int, target_as: str) -> None:
    """On dp the target may be all tokens' or this rank's, plain or a DTensor."""
    for mesh in {(2, world_size // 2), (world_size, 1)}:
        case = make_case(world_size, (8, 5), mesh=mesh, shards=(0, 1), weighted=True, ignored=[3], target_as=target_as)
        check(platform, case)
        check(platform, case.but(reduction="none", upstream=np.linspace(-1.0, 1.0, 8)))


@pytest.mark.contract("P4", "P2")
@on_groups(4)
@pytest.mark.parametrize("ignored", [(0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8))], ids=["first", "second", "all"])
@reductions
def test_ranks_without_a_valid_token(platform: str, world_size: int, ignored: tuple[int, ...], reduction: str) -> None:
    """All tokens of one dp rank, or of all, are ignored."""
    case = make_case(
        world_size, (8, 5), mesh=(2, 2), shards=(0, 1), ignored=ignored, reduction=reduction, weighted=True
    )
    check(platform, case)


@pytest.mark.contract("P4")
@on_groups(4)
@pytest.mark.parametrize("tokens", [1, 3, 5, 0])
@reductions
def test_uneven_tokens(platform: str, world_size: int, tokens: int, reduction: str) -> None:
    """The batch does not divide by dp, or is smaller than it: a rank without tokens takes part."""
    check(platform, make_case(world_size, (tokens, 5), mesh=(2, 2), shards=(0, 1), reduction=reduction, weighted=True))
    check(platform, make_case(world_size, (tokens, 3), mesh=(4, 1), shards=(0, 1), reduction=reduction))


@pytest.mark.contract("P4", "P2", "TRAP12")
@on_groups(4)
@reductions
def test_two_token_dims_on_two_mesh_dims(platform: str, world_size: int, reduction: str) -> None:
    """Batch on dp, sequence on cp, no class parallelism; and cp with tp."""
    shape = (3, 5, 4)  # N, C, S
    for mesh, shards in (((2, 2, 1), (0, 2, 1)), ((1, 2, 2), (0, 2, 1)), ((2, 1, 2), (0, 2, 1))):
        case = make_case(
            world_size, shape, mesh=mesh, shards=shards, reduction=reduction, weighted=True, ignored=[0, 5, 6]
        )
        check(platform, case.but(target_as="local"))
        check(platform, case)


@pytest.mark.contract("P4")
@on_groups(8)
@reductions
def test_three_dims(platform: str, world_size: int, reduction: str) -> None:
    """Dp, cp and tp of two ranks each: the mean is over the tokens of dp and cp."""
    case = make_case(
        world_size, (3, 5, 4), mesh=(2, 2, 2), shards=(0, 2, 1), reduction=reduction, weighted=True, ignored=[0, 5, 6]
    )
    check(platform, case.but(target_as="sharded"))
    check(platform, case.but(shards=(0, 0, 1), logits=case.logits, target_as="local"))
    check(platform, case.but(shards=(0, None, 1)))


@pytest.mark.contract("P4")
@on_groups(4)
def test_one_token_dim_on_two_mesh_dims(platform: str, world_size: int) -> None:
    """Flattened tokens, cut by dp and again by cp."""
    case = make_case(
        world_size, (7, 5), mesh=(2, 2), shards=(0, 0), mesh_names=("dp", "cp"), weighted=True, ignored=[6]
    )
    for reduction in REDUCTIONS:
        upstream = np.linspace(0.5, 1.0, 7) if reduction == "none" else 2.0
        # Nothing shards the classes: what is computed is the plain loss, its reduction over the whole mesh.
        check(platform, case.but(reduction=reduction, upstream=upstream, context={"strict": False}))


@pytest.mark.contract("P4", "P3")
@on_groups(3)
def test_three_ranks_of_classes_beside_one_of_tokens(platform: str, world_size: int) -> None:
    """1 x 3 and 3 x 1 meshes with uneven cuts."""
    for mesh in ((1, 3), (3, 1)):
        check(platform, make_case(world_size, (7, 8), mesh=mesh, shards=(0, 1), weighted=True, ignored=[2]))
