"""Bad input: one error on every rank, of the same type and text, that names both sides; nobody waits."""

from __future__ import annotations

import pytest

from tests.conformance.bad_call_table import BAD_CALLS, run_bad_call
from tests.conformance.cases import make_case
from tests.conformance.groups import on_groups
from tests.conformance.loss_calls import check
from tests.harness import Raised, run_distributed

_ROWS = {"LossParallelLayoutError": "E1", "LossParallelUnsupportedError": "E2", "IndexError": "TRAP4"}


def _contract(name: str) -> list[pytest.MarkDecorator]:
    row = _ROWS.get(BAD_CALLS[name].error, "P1")
    rows = [row, *(["TRAP8"] if row == "E2" else [])]
    return [pytest.mark.contract(*rows)]


def _names(two_dims: bool) -> list:
    return [
        pytest.param(name, marks=_contract(name), id=name.replace(" ", "-"))
        for name, bad in BAD_CALLS.items()
        if (bad.mesh is not None) == two_dims
    ]


def assert_refused(platform: str, world_size: int, name: str) -> None:
    """Every rank raises what the table says, within the harness's limit of 20 s, and goes on."""
    bad = BAD_CALLS[name]
    if bad.only is not None and platform not in bad.only:
        pytest.skip(f"{platform} on CPU has no {name}: the call cannot be made")
    raised: list[Raised] = run_distributed(
        run_bad_call, name, platform=platform, world_size=world_size, expect_error=True
    )
    for found in raised:
        assert found.type == bad.error, found
        for part in bad.says:
            assert part in found.message, f"{part!r} is not in {found.message!r}"
    assert len(set(raised)) == 1 or not bad.same_text, raised
    check(platform, make_case(world_size, (2, 5)))  # the next call is right


@on_groups(2, 3)
@pytest.mark.parametrize("name", _names(two_dims=False))
def test_one_mesh_dim(platform: str, world_size: int, name: str) -> None:
    """Everything that the ranks can see differently."""
    assert_refused(platform, world_size, name)


@on_groups(4)
@pytest.mark.parametrize("name", _names(two_dims=True))
def test_two_mesh_dims(platform: str, world_size: int, name: str) -> None:
    """The ranks of other mesh dims raise too."""
    assert_refused(platform, world_size, name)
