"""The harness itself: what it returns, whom it names when something goes wrong, and that it goes on.

What it does by itself is tried without a framework (the platform "none"), which starts quickly.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import harness
from tests.harness import WorkerGroup, group, platforms, run_distributed, this_rank, this_world_size
from tests.harness.backends import all_ranks_meet
from tests.harness.protocol import Success, encode

_VARIABLE: ContextVar[str] = ContextVar("_VARIABLE", default="unset")


# What the workers run.


def who() -> tuple[int, int, str, int]:
    return this_rank(), this_world_size(), os.environ["HYPER_PARALLEL_PLATFORM"], os.getpid()


def scale(array: np.ndarray, factor: float = 1.0) -> dict[str, Any]:
    return {"value": array * factor * this_rank(), "nothing": None}


def echo(value: Any) -> Any:
    return value


def set_variable() -> str:
    before = _VARIABLE.get()
    _VARIABLE.set("set")
    return before


def fail_on(ranks: tuple[int, ...]) -> int:
    print(f"rank {this_rank()} was here")
    if this_rank() in ranks:
        raise ValueError(f"boom on {this_rank()}")
    return this_rank()


def meet_without(rank: int, how: str) -> None:
    """All ranks but one wait in a collective."""
    if this_rank() != rank:
        all_ranks_meet()
    elif how == "raise":
        raise ValueError("boom")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def exit_on(rank: int) -> None:
    if this_rank() == rank:
        os._exit(7)


def hang_on(rank: int) -> None:
    if this_rank() == rank:
        time.sleep(3600)


def fail_after_different_collectives() -> None:
    import torch
    import torch.distributed as dist

    if this_rank() == 1:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("boom")


# On the platforms.


@pytest.mark.parametrize("world_size", [2])
class TestPlatforms:
    def test_every_rank_runs_in_one_group(self, platform: str, world_size: int) -> None:
        found = run_distributed(who, platform=platform, world_size=world_size)
        assert [entry[:3] for entry in found] == [(rank, world_size, platform) for rank in range(world_size)]
        assert [entry[3] for entry in found] == harness.workers(platform, world_size).pids
        assert (
            run_distributed(all_ranks_meet, platform=platform, world_size=world_size) == [True] * world_size
        )

    def test_group_is_reused_and_quick(self, platform: str, world_size: int, workers: Any) -> None:
        first = workers(platform, world_size)
        start = time.monotonic()
        for n in range(20):
            assert run_distributed(echo, n, platform=platform, world_size=world_size) == [n, n]
        assert time.monotonic() - start < 2.0
        assert workers(platform, world_size) is first

    def test_expected_errors_keep_the_group(self, platform: str, world_size: int) -> None:
        first = harness.workers(platform, world_size)
        found = run_distributed(fail_on, (0, 1), expect_error=True, platform=platform, world_size=world_size)
        assert found == [("ValueError", "boom on 0"), ("ValueError", "boom on 1")]
        assert found[1].type == "ValueError" and found[1].message == "boom on 1"
        assert harness.workers(platform, world_size) is first

    def test_killed_rank_while_another_waits(self, platform: str, world_size: int) -> None:
        harness.workers(platform, world_size)
        start = time.monotonic()
        with pytest.raises(harness.RankDied, match="rank 1 was killed by SIGKILL") as caught:
            run_distributed(meet_without, 1, "kill", platform=platform, world_size=world_size)
        assert caught.value.ranks == (1,)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(("platform", "world_size"), [("torch", 2)])
class TestTorch:
    def test_exception_while_another_rank_waits(self, platform: str, world_size: int) -> None:
        pids = harness.workers(platform, world_size).pids
        with pytest.raises(harness.RankError, match="rank 1 raised ValueError: boom") as caught:
            run_distributed(meet_without, 1, "raise", platform=platform, world_size=world_size)
        assert caught.value.ranks == (1,)
        text = str(caught.value)
        assert "rank 0 did not answer within 2 s after that" in text
        assert "in all_ranks_meet" in text.split("--- output of rank 0 ---")[1], (
            "the stack of the waiting rank"
        )
        assert not any(_exists(pid) for pid in pids)
        assert run_distributed(all_ranks_meet, platform=platform, world_size=world_size) == [True, True]

    def test_expected_errors_out_of_step(
        self, platform: str, world_size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(group, "_CHECK_SECONDS", 1.0)
        first = harness.workers(platform, world_size)
        found = first.run(fail_after_different_collectives, expect_error=True)
        assert found == [("ValueError", "boom")] * 2
        assert not first.is_alive(), "its next collective would not match"


@pytest.mark.parametrize(("platform", "world_size"), [("torch", 8)])
def test_eight_ranks(platform: str, world_size: int) -> None:
    assert run_distributed(all_ranks_meet, platform=platform, world_size=world_size) == [True] * 8


# Without a framework.


@pytest.fixture
def pair() -> Iterator[WorkerGroup]:
    found = WorkerGroup("none", 2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def lasting_pair() -> Iterator[WorkerGroup]:
    found = WorkerGroup("none", 2)
    yield found
    found.close()


def test_arrays_and_keywords(lasting_pair: WorkerGroup) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    first, second = lasting_pair.run(scale, array, factor=2.0)
    assert first["nothing"] is None and second["value"].dtype == np.float32
    np.testing.assert_array_equal(first["value"], 0 * array)
    np.testing.assert_array_equal(second["value"], 2 * array)


@given(value=st.recursive(st.none() | st.integers() | st.binary(), st.lists))
def test_plain_values_arrive_unchanged(lasting_pair: WorkerGroup, value: Any) -> None:
    assert lasting_pair.run(echo, value) == [value, value]


def test_context_variables_do_not_leak(lasting_pair: WorkerGroup) -> None:
    assert lasting_pair.run(set_variable) == ["unset", "unset"]
    assert lasting_pair.run(set_variable) == ["unset", "unset"]


@pytest.mark.parametrize("function", [lambda: 0, "".join, Counter().update], ids=["lambda", "C", "method"])
def test_functions_that_workers_cannot_find(lasting_pair: WorkerGroup, function: Any) -> None:
    with pytest.raises(TypeError, match="a worker cannot import|leave decorators off"):
        lasting_pair.run(function)
    assert lasting_pair.is_alive()


def test_framework_values_are_refused() -> None:
    tensor = type("Tensor", (), {"__module__": "torch", "__reduce__": lambda self: (int, ())})
    with pytest.raises(TypeError, match="returned a torch.Tensor; expected NumPy arrays and plain"):
        encode(Success({"inside": [tensor()]}))


def test_exception_on_one_rank(pair: WorkerGroup) -> None:
    with pytest.raises(harness.RankError) as caught:
        pair.run(fail_on, (1,))
    assert caught.value.ranks == (1,)
    text = str(caught.value)
    first = "none group of 2, running tests.unit.test_harness.fail_on: rank 1 raised ValueError: boom on 1; "
    assert text.startswith(first + "rank 0 did as expected")
    assert "--- traceback of rank 1 ---" in text and "in fail_on" in text
    assert "--- output of rank 0 ---\nrank 0 was here" in text
    assert not pair.is_alive()
    with pytest.raises(RuntimeError, match="the none group of 2 is closed"):
        pair.run(who)


def test_exception_on_every_rank(pair: WorkerGroup) -> None:
    with pytest.raises(harness.RankError) as caught:
        pair.run(fail_on, (0, 1))
    assert caught.value.ranks == (0, 1)


def test_hang(pair: WorkerGroup) -> None:
    with pytest.raises(
        harness.RankTimeout, match="rank 1 did not answer within 0.5 s; rank 0 did as"
    ) as caught:
        pair.run(hang_on, 1, timeout=0.5)
    assert caught.value.ranks == (1,)
    assert "in hang_on" in str(caught.value), "the stack of the rank that hangs"


def test_exit(pair: WorkerGroup) -> None:
    with pytest.raises(harness.RankDied, match="rank 0 ended with exit code 7"):
        pair.run(exit_on, 0)


def test_expected_error_that_one_rank_does_not_raise(pair: WorkerGroup) -> None:
    with pytest.raises(harness.RankError, match="rank 0 returned, where every rank was expected to raise"):
        pair.run(fail_on, (1,), expect_error=True)


def test_interrupt(pair: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.run(who)
    assert not pair.is_alive()


def test_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(harness.GroupStartError, match="ranks 0, 1 raised KeyError: 'jax'") as caught:
        WorkerGroup("jax", 2)
    assert caught.value.ranks == (0, 1)


def test_pool() -> None:
    pool = harness.GroupPool(most_groups=2, most_workers=3, start=lambda _, size: WorkerGroup("none", size))
    try:
        one = pool.get("torch", 1)
        two = pool.get("torch", 2)
        assert pool.get("torch", 1) is one
        other = pool.get("mindspore", 1)  # a third group: the least recently used, two, goes
        assert one.is_alive() and other.is_alive() and not two.is_alive()
        three = pool.get("torch", 3)  # no room for a fourth worker
        assert not one.is_alive() and not other.is_alive()
        three.close()
        assert pool.get("torch", 3) is not three
    finally:
        pool.close()
    with pytest.raises(ValueError, match="unknown platform 'jax', expected one of"):
        pool.get("jax", 1)


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="world_size is 0, expected 1 or more"):
        WorkerGroup("torch", 0)
    with pytest.raises(RuntimeError, match="call this in a function that run_distributed"):
        this_rank()


def test_platforms_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_selected", {"torch"})
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(pytest.skip.Exception, match="MindSpore was not selected by --platform"):
        run_distributed(who, platform="mindspore")
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match="MindSpore is not installed"):
        run_distributed(who, platform="mindspore")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
