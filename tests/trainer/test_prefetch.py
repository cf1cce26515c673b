"""Batches made beforehand: in order, bounded, with their errors, and without a thread left behind."""

from __future__ import annotations

import threading
import time

import pytest

from hyper_parallel.trainer.data_prefetch import prefetch


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_steps_come_in_order(depth: int) -> None:
    with prefetch(lambda step: -step, 3, 40, depth) as batches:
        assert list(batches) == [(step, -step) for step in range(3, 40)]
    assert threads() == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_error_comes_where_its_step_is_taken(depth: int) -> None:
    def make(step: int) -> int:
        if step == 4:
            raise OSError(f"disk of step {step}")
        return step

    taken = []
    with pytest.raises(OSError, match="disk of step 4"), prefetch(make, 0, 10, depth) as batches:
        for step, _ in batches:
            taken.append(step)
    assert taken == [0, 1, 2, 3] and threads() == 0


def test_no_more_are_made_than_were_asked_for() -> None:
    made = []
    with prefetch(lambda step: made.append(step), 0, 100, 2) as batches:
        next(batches)
        deadline = time.monotonic() + 5
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]  # one taken, two ready, one that waits for room
    assert threads() == 0 and len(made) <= 5


def test_they_are_made_while_the_caller_does_something_else() -> None:
    ready = threading.Event()
    with prefetch(lambda step: ready.set() if step == 1 else None, 0, 2) as batches:
        next(batches)
        assert ready.wait(5)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_leaving_early_ends_the_thread(taken: int) -> None:
    for _ in range(20):
        with prefetch(lambda step: step, 0, 1000, 1) as batches:
            for _ in range(taken):
                next(batches)
        assert threads() == 0
