"""Classes shared by a part of the ranks: a sub-mesh beside others that do the same, or ranks that stay out of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.cases import LossCase, expected_results, make_case
from tests.conformance.groups import on_groups
from tests.conformance.loss_calls import call_loss, mesh_of, placements_of
from tests.conformance.oracle import assert_close
from tests.harness import run_distributed, this_rank


def line_case(line: int) -> LossCase:
    """What two ranks that share the classes compute; every such pair has tokens of its own."""
    return make_case(2, (3 + line, 7), seed=line, weighted=True, ignored=[line], reduction="mean")


def run_line(case: LossCase, mesh: Any, position: int, target: np.ndarray | None = None) -> tuple[Any, Any]:
    """In a worker: loss and gradient on a 1-D mesh of two ranks."""
    from hyper_parallel.loss_parallel import loss_parallel

    adapter = this_adapter()
    labels = adapter.tensor(case.target if target is None else target, "int64")
    weight = adapter.tensor(case.weight, case.dtype)

    def loss_of(x: Any) -> Any:
        logits = adapter.wrap("function", x, mesh, placements_of((1,)), case.logits.shape)
        with loss_parallel(mesh):
            return adapter.unwrap(call_loss(case, logits, labels, weight))

    done = adapter.value_and_grad(loss_of, adapter.tensor(case.logits[case.slices(position)], case.dtype))
    return done.value, done.grad


def assert_line(found: tuple[Any, Any], case: LossCase, position: int) -> None:
    loss, gradient = expected_results(case)[position]
    assert_close(found[0], loss, case.dtype, "loss")
    assert_close(found[1], gradient, case.dtype, "gradient")


@pytest.mark.contract("G4", "P4", "L1")
@on_groups(4)
def test_lines_of_a_mesh(platform: str, world_size: int) -> None:
    """``mesh["tp"]`` of a (dp, tp) mesh: each line of ranks has its own tokens and its own mean."""
    found = run_distributed(lines, None, platform=platform, world_size=world_size)
    for rank, result in enumerate(found):
        assert_line(result, line_case(rank // 2), rank % 2)


def lines(bad_line: int | None) -> tuple[Any, Any] | str:
    """In a worker; ``bad_line`` has a target out of range, on one of its ranks."""
    line, position = divmod(this_rank(), 2)
    mesh, case = mesh_of((2, 2), ("dp", "tp"))["tp"], line_case(line)
    target = case.target.copy()
    if line == bad_line and position == 1:
        target[0] = 7
    try:
        return run_line(case, mesh, position, target)
    except IndexError as error:
        return str(error)


@pytest.mark.contract("TRAP4", "G4")
@on_groups(4)
def test_error_on_one_line(platform: str, world_size: int) -> None:
    """An error of one line of ranks is raised by its ranks; the others compute what they would."""
    found = run_distributed(lines, 0, platform=platform, world_size=world_size)
    assert found[0] == found[1] and "Target 7 is out of bounds for 7 classes" in found[0]
    for rank in (2, 3):
        assert_line(found[rank], line_case(1), rank % 2)


@pytest.mark.contract("G4")
@on_groups(4)
def test_ranks_outside_the_mesh(platform: str, world_size: int) -> None:
    """A mesh over ranks 0 and 2 only: they compute, the others go on."""
    found = run_distributed(some_ranks, platform=platform, world_size=world_size)
    assert found[1] is None and found[3] is None
    assert_line(found[0], line_case(0), 0)
    assert_line(found[2], line_case(0), 1)


def some_ranks() -> tuple[Any, Any] | None:
    """In a worker."""
    from hyper_parallel import DeviceMesh

    mesh = DeviceMesh(this_adapter().device_type, [0, 2], mesh_dim_names=("tp",))
    if mesh.get_coordinate() is None:
        return None
    return run_line(line_case(0), mesh, mesh.get_coordinate()[0])


@pytest.mark.contract("G4")
@on_groups(2)
def test_ranks_in_another_order(platform: str, world_size: int) -> None:
    """A mesh whose ranks descend is computed right, or refused: never a wrong number."""
    found = run_distributed(descending, platform=platform, world_size=world_size)
    assert found[0] == found[1] and (found[0] is True or "must ascend" in found[0])


def descending() -> bool | str:
    """In a worker."""
    from hyper_parallel import DeviceMesh

    try:
        mesh = DeviceMesh(this_adapter().device_type, [1, 0], mesh_dim_names=("tp",))
    except ValueError as error:
        return str(error)
    position = mesh.get_coordinate()[0]
    assert_line(run_line(line_case(0), mesh, position), line_case(0), position)
    return True
