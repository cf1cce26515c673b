"""Every parameter of the loss, for the ways in which users write it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.cases import REDUCTIONS, make_case
from tests.conformance.groups import ENTRIES, TARGET_DTYPES, on_groups, on_offers
from tests.conformance.loss_calls import check

reductions = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.mark.contract("G1", "P1", "I1", "TRAP11")
@on_offers(ENTRIES, "entry")
@reductions
def test_reduction(platform: str, world_size: int, entry: str, reduction: str) -> None:
    """Loss and gradient are the same at every degree; the logits stay as they were."""
    check(platform, make_case(world_size, entry=entry, reduction=reduction))


@pytest.mark.contract("G1", "P1", "TRAP2")
@on_offers(ENTRIES, "entry")
@reductions
def test_weight_with_an_ignored_token(platform: str, world_size: int, entry: str, reduction: str) -> None:
    """The weighted loss with ignored tokens works, and leaves the caller's target as it was."""
    check(platform, make_case(world_size, entry=entry, reduction=reduction, weighted=True, ignored=[2, 4]))


@pytest.mark.contract("P1")
@on_offers(ENTRIES, "entry", 2, 3)
def test_replicated_weight_and_target(platform: str, world_size: int, entry: str) -> None:
    """Weight and target may be replicated DTensors."""
    case = make_case(world_size, entry=entry, weighted=True, ignored=[0])
    check(platform, case.but(weight_as="replicated", target_as="replicated"))
    check(platform, case.but(weight_as="replicated"))
    check(platform, case.but(target_as="replicated"))


@pytest.mark.contract("P1")
@on_groups()
@pytest.mark.parametrize("ignore_index", [-100, -1, 3, 10, 250, None])
@pytest.mark.parametrize("entry", ["function", "decomposed"])
def test_ignore_index(platform: str, world_size: int, ignore_index: int | None, entry: str) -> None:
    """Any value, one that is a class too; loss and gradient row of an ignored token are exactly 0."""
    case = make_case(
        world_size, ignore_index=ignore_index, ignored=[1, 5], weighted=True, reduction="none", entry=entry
    )
    for result in check(platform, case):
        assert not result["loss"][[1, 5]].any() and not result["grad"][[1, 5]].any()
    check(platform, case.but(reduction="mean", upstream=1.0))


@pytest.mark.contract("P1")
@on_offers(TARGET_DTYPES, "target_dtype")
def test_target_dtype(platform: str, world_size: int, target_dtype: str) -> None:
    """Any integer dtype, the narrow ones too, whose own range ends before the default ignore_index or the classes."""
    unsigned = target_dtype.startswith("u")
    case = make_case(world_size, target_dtype=target_dtype, ignored=[] if unsigned else [3], weighted=True)
    check(platform, case)
    check(platform, case.but(entry="decomposed"))


@pytest.mark.contract("P1")
@on_groups(2, 3)
def test_unsigned_target_with_its_own_ignore_index(platform: str, world_size: int) -> None:
    """255 in a uint8 target is 255, not -1; 200 is a class where there are more classes than int8 can count."""
    check(platform, make_case(world_size, target_dtype="uint8", ignore_index=255, ignored=[0, 3]))
    case = make_case(world_size, (5, 230), target_dtype="uint8")
    check(platform, case.but(target=np.array([200, 0, 229, 128, 127])))


@pytest.mark.contract("P1")
@on_groups(1, 2, 3)
@pytest.mark.parametrize(
    ("size_average", "reduce"),
    [(a, r) for a in (None, True, False) for r in (None, True, False) if (a, r) != (None, None)],
)
def test_deprecated_arguments(platform: str, world_size: int, size_average: bool | None, reduce: bool | None) -> None:
    """``size_average`` and ``reduce`` override ``reduction``, with PyTorch's meaning."""
    if platform == "mindspore":
        pytest.skip("MindSpore's functions have no such arguments")
    options = {"size_average": size_average, "reduce": reduce}
    case = make_case(world_size, options=options, ignored=[1], weighted=True, reduction="mean")
    if case.effective_reduction == "none":
        case = case.but(upstream=np.linspace(-1.0, 1.5, case.target.size))
    check(platform, case)
    check(platform, case.but(reduction=None))


@pytest.mark.contract("P1")
@on_groups(2)
def test_default_arguments(platform: str, world_size: int) -> None:
    """Without any option: mean, ignore_index -100."""
    check(platform, make_case(world_size, reduction=None, ignored=[2]))


@pytest.mark.contract("G1", "P1")
@on_groups(2, 3)
@reductions
def test_upstream_gradient(platform: str, world_size: int, reduction: str) -> None:
    """The gradient that comes back to the loss multiplies, zero too (gradient accumulation divides the loss)."""
    upstream = {"upstream": 0.125} if reduction != "none" else {}
    check(platform, make_case(world_size, reduction=reduction, weighted=True, ignored=[0], **upstream))
    zero = make_case(world_size, reduction=reduction, weighted=True, upstream=0.0)
    assert not any(result["grad"].any() for result in check(platform, zero))


@pytest.mark.contract("P1")
@on_groups(2, 3)
def test_zero_weights(platform: str, world_size: int) -> None:
    """Classes of weight 0 count nothing; when nothing counts, mean is NaN as in PyTorch."""
    case = make_case(world_size, weighted=True)
    some = case.weight.copy()
    some[case.target[:3]] = 0.0
    check(platform, case.but(weight=some))
    check(platform, case.but(weight=some, reduction="sum"))
    check(platform, case.but(weight=np.zeros_like(some), reduction="sum"))
    check(platform, case.but(weight=np.zeros_like(some), reduction="none"))
    for result in check(platform, case.but(weight=np.zeros_like(some))):
        assert np.isnan(result["loss"])
