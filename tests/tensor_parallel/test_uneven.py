"""Plain tensors sharded unevenly, and layouts that a tensor cannot have: every rank says so, none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.placement_types import Replicate, Shard
from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.arrays import pieces, values

WIDTH = 6


def said(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each call raises; the ranks go on together, which they could not if one of them waited."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def uneven(lengths: tuple[int, ...]) -> dict[str, str]:
    """Errors of everything that takes a plain tensor for an even piece of a whole."""
    from hyper_parallel import (
        ColumnParallelLinear,
        ColwiseParallel,
        NoParallel,
        PrepareModuleInput,
        RowParallelLinear,
        RowwiseParallel,
        SequenceParallel,
        VocabParallelEmbedding,
        VocabParallelHead,
        gather_from_sequence_region,
        gather_from_tp_region,
        parallelize_module,
        reduce_scatter_to_sequence_region,
    )
    from hyper_parallel.tensor_parallel.linear_loss import LinearLossParallel
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    group, own, float64 = adapter.mesh["tp"], lengths[this_rank()], adapter.dtype("float64")
    x = adapter.tensor(np.ones((2, own, WIDTH)))
    ids = adapter.tensor(np.ones((2, own)), "int64")

    def planned(style: Any, x: Any = x, name: str = "linear", *sizes: int) -> Callable[[], Any]:
        model = parallelize_module(adapter.module(name, *(sizes or (WIDTH, WIDTH))), group, style)
        return lambda: model(x)

    prepared = parallelize_module(
        adapter.module("Tiny"), group, {"layers.*.mlp": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)}
    )  # fmt: skip
    column = ColumnParallelLinear(WIDTH, 4, group=group, sequence_parallel=True, dtype=float64)
    row = RowParallelLinear(WIDTH, 4, group=group, sequence_parallel=True, dtype=float64)
    table = VocabParallelEmbedding(11, 4, group=group, sequence_parallel=True, dtype=float64)
    head = VocabParallelHead(WIDTH, 11, group=group, sequence_parallel=True, dtype=float64)
    return said({
        "column": lambda: column(x),
        "head": lambda: head(x),
        "colwise": planned(ColwiseParallel(input_layouts=Shard(1))),
        "row": lambda: row(x[..., :3]),
        "rows of a table": lambda: table(ids),
        "rowwise": planned(RowwiseParallel(input_layouts=Shard(1))),
        "embedding": planned(RowwiseParallel(input_layouts=Shard(1)), ids, "embedding", 11, 4),
        "linear loss": planned(LinearLossParallel(input_layouts=Shard(1))),
        "whole module": planned(NoParallel(input_layout=Shard(1))),
        "norm to a DTensor": planned(SequenceParallel()),
        "prepared": lambda: prepared.layers[1].mlp(x),
        "gather": lambda: gather_from_tp_region(x, group, 1),
        "gather of a sequence": lambda: gather_from_sequence_region(x, group),
        "reduce-scatter": lambda: reduce_scatter_to_sequence_region(x, group),
        "batch": lambda: gather_from_tp_region(adapter.tensor(np.ones((own, 3))), group, 1),
        "dims": lambda: gather_from_tp_region(adapter.tensor(np.ones((2, 3, 3)[: 1 + own % 2 + 1])), group, 2),
        "dtype": lambda: gather_from_tp_region(adapter.tensor(np.ones(3), ("float32", "float64")[own % 2]), group),
    })  # fmt: skip


@on_groups(2)
@pytest.mark.parametrize("lengths", [(3, 2), (2, 3), (1, 0)])
def test_uneven_without_a_length(platform: str, world_size: int, lengths: tuple[int, int]) -> None:
    first, second = run_distributed(uneven, lengths, platform=platform, world_size=world_size)
    assert first == second
    held = f"unevenly: {lengths[0]} on rank 0, {lengths[1]} on rank 1; expected as many elements on every rank. "
    for name, text in first.items():
        if name == "rows of a table":  # the ids are compared before they are looked up
            assert text.startswith("ValueError: VocabParallelEmbedding: the ranks differ: int64 (2, "), text
            continue
        if name in ("row", "reduce-scatter", "batch", "dims", "dtype"):
            assert text.startswith("ValueError") and "the ranks hold different tensors: float" in text, text
            continue
        assert text.startswith("ValueError: ") and held in text, (name, text)
        assert "torch.chunk" in text if lengths == (2, 3) and "gather" not in name else "torch.chunk" not in text
        if "gather" in name:
            assert f"size={lengths}" in text
        elif name in ("column", "head", "colwise"):
            assert f"sequence_length={sum(lengths)}" in text
        else:
            assert "as a DTensor" in text
    assert first["column"].startswith("ValueError: ColumnParallelLinear: ")
    assert first["prepared"].startswith("ValueError: layers.1.mlp: ")


def told(case: str) -> tuple[np.ndarray, dict[str, int]]:
    """A column-parallel layer on 3 and 2 tokens, or on a norm's of them."""
    from hyper_parallel import ColumnParallelLinear, DTensor, SequenceParallel, parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    x = pieces(values(2, 5, WIDTH), 1, 2)[this_rank()]
    layer = ColumnParallelLinear(
        WIDTH, 4, bias=False, group=adapter.mesh["tp"], sequence_parallel=True, dtype=adapter.dtype("float64")
    )
    adapter.fill(layer.weight, values(4, WIDTH, seed=1))
    norm = adapter.module("Tiny").norm
    parallelize_module(norm, adapter.mesh, SequenceParallel(use_local_output=True))

    def call(x: Any) -> Any:
        if case == "norm":
            return norm(x)
        if case == "length":
            return layer(x, sequence_length=5)
        if case == "even":
            return layer(x[:, :2])
        if case == "too short on one rank":
            return layer(x[:, : 3 - 2 * this_rank()], sequence_length=5)
        if case == "told differently":
            return layer(x, sequence_length=5 + this_rank())
        return layer(DTensor.from_local(x, adapter.mesh, [Shard(1)], shape=(2, 5, WIDTH)))

    found = adapter.differentiate(call, [adapter.tensor(x)])
    return found.value, found.forward


@on_groups(2)
def test_uneven_that_is_told(platform: str, world_size: int) -> None:
    """No header, where nothing is taken for granted: a DTensor knows, a norm needs no length."""
    y, sides = values(2, 5, WIDTH) @ values(4, WIDTH, seed=1).T, (slice(0, 2), slice(2, 4))
    for case in ("length", "DTensor"):
        for rank, (value, forward) in enumerate(run_distributed(told, case, platform=platform, world_size=world_size)):
            np.testing.assert_allclose(value, y[..., sides[rank]], rtol=1e-12)
            assert forward == {"all_gather": 2 if case == "length" else 1}
    for rank, (value, forward) in enumerate(run_distributed(told, "norm", platform=platform, world_size=world_size)):
        assert value.shape == (2, 3 - rank, WIDTH) and forward == {}
    for _, forward in run_distributed(told, "even", platform=platform, world_size=world_size):
        assert forward == {"all_gather": 2}


@on_groups(2)
def test_told_wrongly(platform: str, world_size: int) -> None:
    """On one rank only: an error on all."""
    for case, text in {
        "too short on one rank": "dim 1 of a plain tensor is sharded as 3 on rank 0, 1 on rank 1; expected (3, 2), "
        "the pieces of 5",
        "told differently": "float64 (2, 3, 6) of 5 on rank 0, float64 (2, 2, 6) of 6 on rank 1",
    }.items():
        for error in run_distributed(told, case, platform=platform, world_size=world_size, expect_error=True):
            assert error.type == "ValueError" and text in error.message


def impossible(dim: int) -> dict[str, str]:
    """Errors of layouts over a dim that no activation here has, in the first forward."""
    from hyper_parallel import (
        ColumnParallelLinear,
        ColwiseParallel,
        NoParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from hyper_parallel.tensor_parallel.linear_loss import LinearLossParallel
    from tests.tensor_parallel.adapters import this_adapter

    adapter, there = this_adapter(), Shard(dim)
    x, ids = adapter.tensor(np.ones((2, 4, WIDTH))), adapter.tensor(np.ones((2, 4)), "int64")

    def planned(style: Any) -> Callable[[], Any]:
        model = adapter.module("Tiny")
        name = "layers.1.mlp.extra"
        model.layers[1].mlp.extra = adapter.module("linear", WIDTH, WIDTH)
        parallelize_module(model, adapter.mesh, {name: style})
        return lambda: model.layers[1].mlp.extra(x)

    def looked_up(style: Any) -> Callable[[], Any]:
        model = parallelize_module(adapter.module("Tiny"), adapter.mesh, {"embed": style})
        return lambda: model(ids)

    moved = {"desired_input_layouts": Replicate(), "use_local_output": True}
    options: dict[str, Any] = {"group": adapter.mesh, "dtype": adapter.dtype("float64"), "sequence_parallel": True}
    column = ColumnParallelLinear(WIDTH, 4, sequence_dim=dim, **options)
    return said({
        "column": lambda: column(x),
        "colwise": planned(ColwiseParallel(input_layouts=there)),
        "colwise out": planned(ColwiseParallel(output_layouts=there)),
        "rowwise": planned(RowwiseParallel(input_layouts=there)),
        "rowwise out": planned(RowwiseParallel(input_layouts=Replicate(), output_layouts=there)),
        "linear loss": planned(LinearLossParallel(input_layouts=there)),
        "norm": planned(SequenceParallel(sequence_dim=dim)),
        "local norm": planned(SequenceParallel(sequence_dim=dim, use_local_output=True)),
        "whole": planned(NoParallel(input_layout=there)),
        "whole out": planned(NoParallel(output_layout=there)),
        "prepared": planned(PrepareModuleInput(input_layouts=there, **moved)),
        "prepared for": planned(PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=there)),
        "prepared out": planned(PrepareModuleOutput(output_layouts=there, desired_output_layouts=Replicate())),
        "kept out": planned(PrepareModuleOutput(output_layouts=there, desired_output_layouts=there)),
        "embed": looked_up(RowwiseParallel(input_layouts=there)),
        "embed out": looked_up(ColwiseParallel(output_layouts=there)),
    })  # fmt: skip


@on_groups(2)
@pytest.mark.parametrize("dim", [7, -9])
def test_a_dim_that_is_not_there(platform: str, world_size: int, dim: int) -> None:
    first, second = run_distributed(impossible, dim, platform=platform, world_size=world_size)
    assert first == second
    for name, text in first.items():
        named = {"column": "ColumnParallelLinear", "embed": "embed", "embed out": "embed"}
        where = named.get(name, "layers.1.mlp.extra")
        shape, dims = ("(2, 4)", "-2 to 1") if name == "embed" else ("(2, 4, ", "-3 to 2")
        assert text.startswith(f"IndexError: {where}: found Shard(dim={dim}) for an "), (name, text)
        assert shape in text and f"expected a dim from {dims}" in text, (name, text)


def no_layouts() -> dict[str, str]:
    """Errors of styles that are made with what can be no layout."""
    from hyper_parallel import (
        ColwiseParallel,
        NoParallel,
        Partial,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )
    from hyper_parallel.tensor_parallel.linear_loss import LinearLossParallel

    wrong: Any = "Shard(1)"
    ends: dict[str, Any] = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
    return said({
        "colwise": lambda: ColwiseParallel(input_layouts=wrong),
        "colwise out": lambda: ColwiseParallel(output_layouts=Partial()),
        "rowwise": lambda: RowwiseParallel(input_layouts=1),  # type: ignore[arg-type]
        "rowwise out": lambda: RowwiseParallel(output_layouts=(Shard(1), Shard(2))),  # type: ignore[arg-type]
        "linear loss": lambda: LinearLossParallel(input_layouts=wrong),
        "whole": lambda: NoParallel(input_layout=wrong),
        "prepared": lambda: PrepareModuleInput(input_layouts=(None, wrong), desired_input_layouts=(None, None)),
        "by name": lambda: PrepareModuleInput(
            input_kwarg_layouts={"x": wrong}, desired_input_kwarg_layouts={"x": Replicate()}
        ),
        "prepared out": lambda: PrepareModuleOutput(output_layouts=wrong, desired_output_layouts=Replicate()),
        "both": lambda: PrepareModuleInputOutput(input_layouts=7, desired_input_layouts=Replicate(), **ends),  # type: ignore[arg-type]
        "norm": lambda: SequenceParallel(sequence_dim="1"),  # type: ignore[arg-type]
    })  # fmt: skip


@on_groups(2)
def test_what_can_be_no_layout(platform: str, world_size: int) -> None:
    for found in run_distributed(no_layouts, platform=platform, world_size=world_size):
        for name, text in found.items():
            if name == "norm":
                assert text == "TypeError: Shard(dim) takes an integer, found '1'"
            else:
                assert text.startswith("ParallelPlanError: expected Shard(dim)") and "found" in text, (name, text)
