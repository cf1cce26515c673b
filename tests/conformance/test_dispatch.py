"""Where the dispatcher turns to loss parallel, by which names, and what its cache tells apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.cases import make_case
from tests.conformance.groups import OUR_ENTRIES, on_groups, on_offers
from tests.conformance.loss_calls import call_loss, local_logits, logits_of, run_case, target_of
from tests.harness import run_distributed, this_world_size


@pytest.mark.contract("I1", "I3", "G4")
@on_offers(OUR_ENTRIES, "entry", 2)
def test_order(platform: str, world_size: int, entry: str) -> None:
    """The loss of our DTensors comes to one point of the dispatcher, and past it does not reach layout inference."""
    run_distributed(order, entry, platform=platform, world_size=world_size)


def order(entry: str) -> None:
    """In a worker: watch the two methods."""
    from hyper_parallel import LOSS_PARALLEL_OP_NAMES
    from hyper_parallel.core.dtensor import dispatcher

    seen: list[tuple[str, str]] = []
    loss, infer = dispatcher._dispatch_loss_parallel, dispatcher._dispatch_layout_infer
    name_of = dispatcher._platform.get_op_name

    def watched_loss(op_call: Any, args: Any, kwargs: Any) -> Any:
        result = loss(op_call, args, kwargs)
        seen.append(("missed" if result is NotImplemented else "loss", name_of(op_call)))
        return result

    def watched_infer(name: str, *rest: Any) -> Any:
        seen.append(("infer", name))
        return infer(name, *rest)

    dispatcher._dispatch_loss_parallel, dispatcher._dispatch_layout_infer = watched_loss, watched_infer  # type: ignore
    try:
        case = make_case(this_world_size(), (4, 6), entry=entry)
        run_case(case)
        steps, names = [step for step, _ in seen], {name for _, name in seen}
        assert set(steps) == {"loss"} and names <= set(LOSS_PARALLEL_OP_NAMES), seen
        assert len(steps) == (2 if entry.startswith("decomposed") else 1)
        seen.clear()
        run_case(case.but(shards=(None,)))  # nothing sharded: a miss takes the ordinary path
        assert [step for step, _ in seen] == ["missed", "infer"] * len(steps), seen
        seen.clear()
        logits = logits_of(case, local_logits(case))
        assert logits.shape == (4, 6) and logits.dtype is not None and logits.placements
        logits + logits  # an operator that is not in the table does not come by
        assert {step for step, _ in seen} == {"infer"}
    finally:
        del dispatcher._dispatch_loss_parallel, dispatcher._dispatch_layout_infer


@pytest.mark.contract("I4")
@on_groups(2)
def test_cache_keys(platform: str, world_size: int) -> None:
    """The same call in the context, out of it, and with other strictness: entries of its own."""
    run_distributed(cache_keys, platform=platform, world_size=world_size)


def cache_keys() -> None:
    """In a worker."""
    from hyper_parallel.core.dtensor import dispatcher
    from hyper_parallel.loss_parallel import loss_parallel

    case = make_case(this_world_size(), (4, 6), shards=(None,))
    logits, target = logits_of(case, local_logits(case)), target_of(case)
    cache = dispatcher.cache
    cache.clear()

    def call() -> tuple[int, int, int]:
        call_loss(case, logits, target, None)
        return len(cache.keys()), cache.hits, cache.misses

    assert call() == (1, 0, 1)
    assert call() == (1, 1, 1)
    with loss_parallel():
        assert call() == (2, 1, 2)
        assert call() == (2, 2, 2)
        with loss_parallel(strict=False):
            assert call() == (3, 2, 3)
        assert call() == (3, 3, 3)
    assert call() == (3, 4, 3)
    cache.clear()
    for _ in range(2):  # and with an operator that loss parallel leaves alone
        logits + 1.0
        with loss_parallel():
            logits + 1.0
    assert (len(cache.keys()), cache.hits, cache.misses) == (2, 2, 2)


@pytest.mark.contract("I4", "E3")
@on_groups(2)
def test_in_and_out_by_turns(platform: str, world_size: int) -> None:
    """What was computed in the context is an error out of it, and right in it again."""
    case = make_case(world_size, (4, 6))
    for _ in range(2):
        run_distributed(run_case, case, platform=platform, world_size=world_size)
        raised = run_distributed(
            run_case, case.but(context=None), platform=platform, world_size=world_size, expect_error=True
        )
        assert {kind for kind, _ in raised} == {"LossParallelLayoutError"}


@pytest.mark.contract("I4")
@pytest.mark.platform("torch")
def test_cache_is_bounded() -> None:
    """The oldest entry goes first."""
    from hyper_parallel.core.shard._op_dispatch import LayoutCacheManager

    cache = LayoutCacheManager(capacity=2)
    for key in "abc":
        cache.put(key, object())  # type: ignore[arg-type]
    assert cache.keys() == ["b", "c"] and cache.get("a") is None and cache.misses == 1


@pytest.mark.contract("I3")
@on_groups(1)
def test_names(platform: str, world_size: int) -> None:
    """The table holds the names of the functions and of what they decompose into; more can be registered."""
    run_distributed(names, platform=platform, world_size=world_size)


def names() -> None:
    """In a worker."""
    from hyper_parallel import LOSS_PARALLEL_OP_NAMES, get_platform, register_loss_parallel_op_names

    get_op_name = get_platform().get_op_name
    for function in this_adapter().loss_functions():
        assert get_op_name(function) in LOSS_PARALLEL_OP_NAMES, function
    assert {"cross_entropy", "log_softmax", "nll_loss"} <= set(LOSS_PARALLEL_OP_NAMES)
    assert "add" not in LOSS_PARALLEL_OP_NAMES
    before = len(LOSS_PARALLEL_OP_NAMES)
    register_loss_parallel_op_names("a_loss_of_mine", "another_one")
    register_loss_parallel_op_names("a_loss_of_mine")  # the same again is no conflict
    assert {"a_loss_of_mine", "another_one"} <= set(LOSS_PARALLEL_OP_NAMES)
    assert len(LOSS_PARALLEL_OP_NAMES) == before + 2
    with pytest.raises(ValueError, match="'a_loss_of_mine' is registered as 'cross_entropy'; found 'nll_loss'"):
        register_loss_parallel_op_names("a_loss_of_mine", kind="nll_loss")
    with pytest.raises(ValueError, match="'log_softmax' is registered as 'log_softmax'"):
        register_loss_parallel_op_names("a_third", "log_softmax")
    assert "a_third" not in LOSS_PARALLEL_OP_NAMES
    with pytest.raises(ValueError, match="kind must be one of"):
        register_loss_parallel_op_names("a_fourth", kind="mse")


@pytest.mark.contract("I1")
@on_groups(2)
def test_skipped_dispatch(platform: str, world_size: int) -> None:
    """SkipDTensorDispatch comes before everything: the loss is then the local one."""
    run_distributed(skipped, platform=platform, world_size=world_size)


def skipped() -> None:
    """In a worker."""
    from hyper_parallel import SkipDTensorDispatch
    from hyper_parallel.loss_parallel import loss_parallel

    adapter = this_adapter()
    case = make_case(this_world_size(), (4, 6))
    local = local_logits(case)
    target = adapter.tensor(np.zeros(4), adapter.plain_target_dtype)
    with loss_parallel(), SkipDTensorDispatch():
        found = adapter.cross_entropy("function", logits_of(case, local), target)
    assert adapter.kind_of(found) == "plain"
    expected = adapter.numpy(adapter.cross_entropy("function", local, target))
    np.testing.assert_array_equal(adapter.numpy(found), expected)
