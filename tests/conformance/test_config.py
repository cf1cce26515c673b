"""Strictness, the explicit mesh, the fallback and the configuration: what decides, and what the user is told."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from tests.conformance.cases import LossCase, expected_results, make_case
from tests.conformance.groups import on_groups
from tests.conformance.loss_calls import check, mesh_of, run_case
from tests.conformance.oracle import assert_close
from tests.harness import run_distributed

entries = pytest.mark.parametrize("entry", ["function", "decomposed"])

# Layouts of (N, C) logits on a mesh without a clear class-sharding dim: the mesh, and what it shards.
_ILLEGAL = {
    "two mesh dims shard the classes": ((2, 2), (1, 1)),
    "the token dim is sharded, not the classes": ((4,), (0,)),
}
illegal = pytest.mark.parametrize(("mesh", "shards"), _ILLEGAL.values(), ids=_ILLEGAL)


def with_warnings(case: LossCase) -> tuple[dict[str, Any], list[str]]:
    """In a worker: the result, and the warnings that the library gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run_case(case)
    return result, [str(w.message) for w in caught if "loss" in str(w.message) or "logits" in str(w.message)]


def check_gathered(platform: str, case: LossCase) -> list[str]:
    """The case is computed right, with one warning on every rank that tells the layout; returns the warnings."""
    found = run_distributed(with_warnings, case, platform=platform, world_size=int(np.prod(case.mesh)))
    said = []
    for (result, messages), (loss, gradient) in zip(found, expected_results(case)):
        assert len(messages) == 1, messages
        said += messages
        assert_close(result["loss"], loss, case.dtype, "loss")
        assert_close(result["grad"], gradient, case.dtype, "gradient")
    return said


@pytest.mark.contract("E1", "E4", "L1")
@on_groups(4)
@illegal
def test_strict(platform: str, world_size: int, mesh: tuple[int, ...], shards: tuple[int | None, ...]) -> None:
    """Strict, an unclear layout is an error on every rank that names what was found and expected."""
    case = make_case(world_size, (4, 8), mesh=mesh, shards=shards)
    raised = run_distributed(run_case, case, platform=platform, world_size=world_size, expect_error=True)
    for kind, message in raised:
        assert kind == "LossParallelLayoutError"
        assert "S(" in message and "expected Shard(1) (the class dim) on exactly one mesh dim" in message
    assert len(set(raised)) == 1


@pytest.mark.contract("E4", "C2", "L1")
@on_groups(4)
@illegal
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_not_strict(
    platform: str, world_size: int, mesh: tuple[int, ...], shards: tuple[int | None, ...], reduction: str
) -> None:
    """Not strict, the same is computed right by gathering, with one warning."""
    case = make_case(world_size, (4, 8), mesh=mesh, shards=shards, reduction=reduction, weighted=True, ignored=[1])
    for message in check_gathered(platform, case.but(context={"strict": False})):
        assert "gathering the logits" in message and "expected Shard(1)" in message


@pytest.mark.contract("C2", "L1")
@on_groups(4)
def test_root_of_strict(platform: str, world_size: int) -> None:
    """The config is the root, the argument overrides it inside its own context."""
    mesh, shards = _ILLEGAL["two mesh dims shard the classes"]
    case = make_case(world_size, (4, 8), mesh=mesh, shards=shards)
    lenient = {"loss_parallel_strict_mesh": False}
    check_gathered(platform, case.but(config=lenient))
    check_gathered(platform, case.but(config={"loss_parallel_strict_mesh": True}, context={"strict": False}))
    for bad in (
        case.but(config=lenient, context={"strict": True}),
        case.but(config={"loss_parallel_strict_mesh": True}),
    ):
        for kind, _ in run_distributed(run_case, bad, platform=platform, world_size=world_size, expect_error=True):
            assert kind == "LossParallelLayoutError"


@pytest.mark.contract("L1", "G4")
@on_groups(4)
@entries
def test_explicit_mesh(platform: str, world_size: int, entry: str) -> None:
    """The mesh of the ranks that share the classes is accepted, whichever dim of the logits' mesh it is."""
    case = make_case(world_size, (4, 8), mesh=(2, 2), shards=(0, 1), weighted=True, ignored=[2], entry=entry)
    check(platform, case.but(context={"mesh": "tp"}))
    swapped = case.but(shards=(1, 0))
    check(platform, swapped.but(context={"mesh": "dp"}))


@pytest.mark.contract("E1", "E4", "L1")
@on_groups(4)
@entries
def test_wrong_explicit_mesh(platform: str, world_size: int, entry: str) -> None:
    """Classes over other ranks than those of the mesh given: an error that names both; not strict, gathered."""
    case = make_case(world_size, (4, 8), mesh=(2, 2), shards=(0, 1), context={"mesh": "dp"}, entry=entry)
    raised = run_distributed(run_case, case, platform=platform, world_size=world_size, expect_error=True)
    assert {kind for kind, _ in raised} == {"LossParallelLayoutError"}
    for _, message in raised:
        assert "(tp)" in message and "mesh (dp=2) given to loss_parallel()" in message
    if entry == "function":
        check_gathered(platform, case.but(context={"mesh": "dp", "strict": False}))


@pytest.mark.contract("E1", "L1")
@on_groups(2, 3)
def test_replicated_logits_with_an_explicit_mesh(platform: str, world_size: int) -> None:
    """Whoever names the mesh expects sharded logits: replicated ones are an error; not strict, they are computed."""
    case = make_case(world_size, (4, 8), shards=(None,), context={"mesh": "tp"})
    for kind, message in run_distributed(run_case, case, platform=platform, world_size=world_size, expect_error=True):
        assert kind == "LossParallelLayoutError"
        assert "R@tp" in message and "expected Shard(1)" in message
    check(platform, case.but(context={"mesh": "tp", "strict": False}))


@pytest.mark.contract("L1", "E1")
@on_groups(4)
def test_mesh_argument_that_is_none(platform: str, world_size: int) -> None:
    """A mesh of two dims, or something else, is refused when the context is entered."""
    run_distributed(bad_mesh_arguments, platform=platform, world_size=world_size)


def bad_mesh_arguments() -> None:
    from hyper_parallel.loss_parallel import is_loss_parallel_active, loss_parallel

    mesh = mesh_of((2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"mesh \(dp=2, tp=2\); pass a sub-mesh"), loss_parallel(mesh):
        pass
    with pytest.raises(TypeError), loss_parallel("tp"):
        pass
    assert not is_loss_parallel_active()
    with loss_parallel(mesh["tp"], False):  # positions as in the contract
        assert is_loss_parallel_active()


@pytest.mark.contract("C3", "E3")
@on_groups(2, 3, 4)
@entries
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_fallback_outside_the_context(platform: str, world_size: int, entry: str, reduction: str) -> None:
    """With the fallback, sharded logits outside the context are gathered, with a warning; without, an error."""
    case = make_case(world_size, (4, 7), context=None, entry=entry, weighted=True, ignored=[3], reduction=reduction)
    if entry == "function":
        messages = check_gathered(platform, case.but(config={"loss_parallel_fallback_on_layout_error": True}))
        assert all("outside loss_parallel()" in message for message in messages)
    raised = run_distributed(run_case, case, platform=platform, world_size=world_size, expect_error=True)
    expected = "LossParallelLayoutError" if entry == "function" else "UnsupportedOperatorError"
    assert {kind for kind, _ in raised} <= {expected, "LossParallelLayoutError"}
    for _, message in raised:
        assert "S(1)@tp" in message


@pytest.mark.contract("C3", "TRAP4")
@on_groups(2)
@pytest.mark.parametrize("context", [None, {}, {"strict": False}], ids=["outside", "inside", "not strict"])
def test_bad_target_in_the_fallback(platform: str, world_size: int, context: dict | None) -> None:
    """Gathered or not, a target out of range on one rank alone is the same error on all."""
    case = make_case(world_size, (2, 7), context=context, config={"loss_parallel_fallback_on_layout_error": True})
    shards = (1,) if context is None else (0,)
    bad = case.but(shards=shards, target=np.array([6, 7]), target_as="local" if shards == (0,) else "plain")
    raised = run_distributed(run_case, bad, platform=platform, world_size=world_size, expect_error=True)
    assert {kind for kind, _ in raised} == {"IndexError"}
    assert len(set(raised)) == 1 and "Target 7 is out of bounds for 7 classes" in raised[0].message


@pytest.mark.contract("C3", "E4")
@on_groups(4)
@illegal
def test_fallback_on_an_illegal_layout(
    platform: str, world_size: int, mesh: tuple[int, ...], shards: tuple[int | None, ...]
) -> None:
    """With the fallback, an illegal layout inside the context is gathered although strict, with a warning."""
    case = make_case(world_size, (4, 8), mesh=mesh, shards=shards, weighted=True, ignored=[1])
    check_gathered(platform, case.but(config={"loss_parallel_fallback_on_layout_error": True}))
    check_gathered(
        platform, case.but(config={"loss_parallel_fallback_on_layout_error": True}, context={"strict": True})
    )


@pytest.mark.contract("C1", "L1")
@on_groups(2)
def test_disabled(platform: str, world_size: int) -> None:
    """disable_loss_parallel makes the context a no-op: replicated logits work, sharded ones are refused."""
    case = make_case(world_size, (4, 7), config={"disable_loss_parallel": True}, weighted=True, ignored=[3])
    check(platform, case.but(shards=(None,)))
    for kind, _ in run_distributed(run_case, case, platform=platform, world_size=world_size, expect_error=True):
        assert kind == "LossParallelLayoutError"
    run_distributed(disabled_is_inactive, platform=platform, world_size=world_size)


def disabled_is_inactive() -> None:
    from hyper_parallel import ParallelismConfig, get_train_context, is_loss_parallel_active
    from hyper_parallel.loss_parallel import loss_parallel

    config = ParallelismConfig(tensor_parallel_degree=2, disable_loss_parallel=True)
    with get_train_context(True, config)(), loss_parallel(strict=True):
        assert not is_loss_parallel_active()


@pytest.mark.contract("P1", "E3")
@on_groups(1, 2, 3)
@pytest.mark.parametrize("context", [None, {}], ids=["outside", "inside"])
@pytest.mark.parametrize("target_as", ["plain", "replicated"])
def test_replicated_logits(platform: str, world_size: int, context: dict | None, target_as: str) -> None:
    """Where nothing is sharded the loss is the plain one, with plain labels too, in and out of the context."""
    for entry in ("function", "module", "decomposed"):
        case = make_case(
            world_size, (4, 7), shards=(None,), context=context, target_as=target_as, entry=entry, ignored=[1]
        )
        single = platform == "mindspore" and entry == "module"  # takes no weights in float64
        check(platform, case.but(weight=np.linspace(0.5, 2.0, 7), dtype="float32" if single else "float64"))


@pytest.mark.contract("G3")
@on_groups(2)
def test_plain_tensors_are_left_alone(platform: str, world_size: int) -> None:
    """Plain logits in the context give the plain loss, with smoothing and probabilities as ever."""
    found = run_distributed(plain_losses, platform=platform, world_size=world_size)
    for inside, outside in found:
        if platform == "mindspore":  # its own kernels differ from call to call
            assert inside == pytest.approx(outside, rel=1e-6)
        else:
            assert inside == outside == found[0][1]


def plain_losses() -> tuple[list[float], list[float]]:
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.conformance.adapters import this_adapter

    adapter = this_adapter()
    rng = np.random.default_rng(0)
    logits = adapter.tensor(rng.standard_normal((4, 7)), "float32")
    target = adapter.tensor(np.array([0, 3, -100, 6]), adapter.plain_target_dtype)
    probabilities = adapter.tensor(rng.dirichlet(np.ones(7), 4), "float32")

    def losses() -> list[float]:
        calls = [(target, {}), (target, {"label_smoothing": 0.1}), (probabilities, {})]
        results = [adapter.cross_entropy("function", logits, t, **options) for t, options in calls]
        assert all(adapter.kind_of(x) == "plain" for x in results)
        return [float(adapter.numpy(x)) for x in results]

    with loss_parallel():
        inside = losses()
    return inside, losses()


@pytest.mark.contract("C2", "C4")
@pytest.mark.platform("torch")
def test_loss_parallel_enabled() -> None:
    """Derived in one place from the degree and the switch."""
    from hyper_parallel import ParallelismConfig

    enabled = {
        (degree, disabled): ParallelismConfig(
            tensor_parallel_degree=degree, disable_loss_parallel=disabled
        ).loss_parallel_enabled
        for degree in (1, 2)
        for disabled in (False, True)
    }
    assert enabled == {(1, False): False, (1, True): False, (2, False): True, (2, True): False}
    default = ParallelismConfig()
    assert (default.disable_loss_parallel, default.loss_parallel_strict_mesh) == (False, True)
    assert default.loss_parallel_fallback_on_layout_error is False
    with pytest.raises(ValueError, match="tensor_parallel_degree must be an integer of at least 1, found 0"):
        ParallelismConfig(tensor_parallel_degree=0)
