"""The context: on and off, nested, left by an exception, in other threads; backward wherever it runs."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conformance.cases import LossCase, expected_results, make_case
from tests.conformance.groups import ENTRIES, on_groups, on_offers
from tests.conformance.loss_calls import (
    call_loss,
    check,
    local_logits,
    logits_of,
    mesh_of,
    run_case,
    target_of,
)
from tests.conformance.oracle import assert_close
from tests.harness import run_distributed, this_rank, this_world_size


def _active() -> bool:
    from hyper_parallel import is_loss_parallel_active

    return is_loss_parallel_active()


def _case(**fields: Any) -> LossCase:
    """In a worker: the usual case on all ranks."""
    return make_case(this_world_size(), (4, 6), ignored=[1], **fields)


def _assert_right(case: LossCase) -> None:
    """In a worker: the case gives this rank's expected loss and gradient."""
    found, (loss, gradient) = run_case(case), expected_results(case)[this_rank()]
    assert_close(found["loss"], loss, case.dtype, "loss")
    assert_close(found["grad"], gradient, case.dtype, "gradient")


def _assert_refused(case: LossCase, kind: type[Exception] | None = None) -> None:
    """In a worker: the loss of class-sharded logits raises, as outside the context."""
    from hyper_parallel import LossParallelLayoutError

    with pytest.raises(kind or LossParallelLayoutError):
        call_loss(case, logits_of(case, local_logits(case)), target_of(case), None)


def _in_thread(function: Callable[[], Any]) -> Any:
    """What the function gives in a new thread; its exception is raised here."""
    found: list[Any] = []

    def target() -> None:
        try:
            found.append((True, function()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    done, value = found[0]
    if not done:
        raise value
    return value


@pytest.mark.contract("G3", "L1", "L3", "E3")
@on_groups()
def test_on_and_off(platform: str, world_size: int) -> None:
    """Off before, on inside, off after; outside, class-sharded logits are an error, never a wrong number."""
    run_distributed(on_and_off, platform=platform, world_size=world_size)


def on_and_off() -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case()
    assert not _active()
    _assert_refused(case)
    for _ in range(3):
        with loss_parallel() as given:
            assert given is None
            assert _active()
            _assert_right(case.but(context=None))
        assert not _active()
        _assert_refused(case)


@pytest.mark.contract("G3", "TRAP5")
@on_groups(1, 2)
def test_exception(platform: str, world_size: int) -> None:
    """An exception leaves the context off, and outer settings as they were."""
    run_distributed(exception, platform=platform, world_size=world_size)


def exception() -> None:
    from hyper_parallel.core.state import current_state
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case()
    with pytest.raises(KeyError, match="mine"), loss_parallel():
        raise KeyError("mine")
    assert not _active()
    _assert_refused(case)
    with loss_parallel(strict=True):
        with pytest.raises(KeyboardInterrupt), loss_parallel(strict=False):
            raise KeyboardInterrupt
        assert _active() and current_state().strict
        bad = case.but(target=np.array([0, 99, 1, 2]))
        with pytest.raises(IndexError):
            run_case(bad.but(context=None))  # an error of the library's own
        assert _active()
        _assert_right(case.but(context=None))
    assert not _active()


@pytest.mark.contract("L1", "TRAP5")
@on_groups(2)
def test_nesting(platform: str, world_size: int) -> None:
    """Inner settings win, outer ones come back, then off."""
    run_distributed(nesting, platform=platform, world_size=world_size)


def nesting() -> None:
    from hyper_parallel.core.state import current_state
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case()
    mesh = mesh_of(case.mesh, case.mesh_names)
    with loss_parallel(mesh=mesh, strict=False):
        outer = current_state()
        assert (outer.mesh, outer.strict) == (mesh, False)
        with loss_parallel():
            assert (current_state().mesh, current_state().strict) == (None, True)
            with loss_parallel(strict=False):
                assert _active()
                _assert_right(case.but(context=None))
            assert current_state().strict
            _assert_right(case.but(context=None))
        assert current_state() == outer
        _assert_right(case.but(context=None))
    assert not _active()
    _assert_refused(case)
    one = loss_parallel()
    with one:
        assert _active()
    with pytest.raises((RuntimeError, AttributeError)):  # a generator's context manager serves once
        with one:
            pass
    assert not _active()


@pytest.mark.contract("L1")
@on_groups(2)
def test_as_decorator(platform: str, world_size: int) -> None:
    """``@loss_parallel()`` on a function enters anew at each call."""
    run_distributed(decorated, platform=platform, world_size=world_size)


def decorated() -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    @loss_parallel()
    def inside() -> bool:
        _assert_right(_case(context=None))
        return _active()

    assert inside() and inside() and not _active()


@pytest.mark.contract("I2", "L3", "TRAP5")
@on_groups(1, 2)
def test_threads(platform: str, world_size: int) -> None:
    """Another thread does not see the context, and its own one is not seen here."""
    run_distributed(threads, platform=platform, world_size=world_size)


def threads() -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case()
    with loss_parallel():
        assert _in_thread(_active) is False
        _in_thread(lambda: _assert_refused(case))
        _in_thread(lambda: _assert_right(case))  # enters by itself
        assert _active()
    inside, leave = threading.Event(), threading.Event()

    def enter_and_wait() -> None:
        with loss_parallel():
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=enter_and_wait)
    thread.start()
    assert inside.wait(10)
    assert not _active()
    _assert_refused(case)
    leave.set()
    thread.join()
    assert not _active()


@pytest.mark.contract("I2", "L3")
@on_groups(1, 2)
def test_copied_contexts(platform: str, world_size: int) -> None:
    """A copy of the context, as a framework makes for its tasks, carries the state along, in a thread too."""
    run_distributed(copied_contexts, platform=platform, world_size=world_size)


def copied_contexts() -> None:
    from hyper_parallel.loss_parallel import loss_parallel

    case = _case(context=None)
    with loss_parallel():
        copy = contextvars.copy_context()
        assert copy.run(_active)
    assert not _active() and copy.run(_active)
    copy.run(_assert_right, case)
    copy.run(lambda: _in_thread(lambda: None))
    _in_thread(lambda: copy.run(_assert_right, case))
    assert not _active()


@pytest.mark.contract("G3", "TRAP10")
@on_offers(ENTRIES, "entry", 1, 2)
@pytest.mark.parametrize("backward_inside", [False, True], ids=["after", "inside"])
def test_backward(platform: str, world_size: int, entry: str, backward_inside: bool) -> None:
    """Backward inside the context, or after it."""
    check(platform, make_case(world_size, entry=entry, backward_inside=backward_inside, weighted=True, ignored=[0]))


@pytest.mark.contract("C4", "L2")
@on_groups(2)
def test_train_context(platform: str, world_size: int) -> None:
    """A TrainContext gives a fresh context manager at each call, for training and validation, on or off."""
    run_distributed(train_context, platform=platform, world_size=world_size)


def train_context() -> None:
    from hyper_parallel import ParallelismConfig, get_train_context
    from hyper_parallel.core.state import current_state

    case = _case(context=None)
    config = ParallelismConfig(tensor_parallel_degree=this_world_size(), loss_parallel_strict_mesh=False)
    on, off = get_train_context(config.loss_parallel_enabled, config), get_train_context(False)
    for _ in range(2):
        with on():
            assert _active() and not current_state().strict and current_state().config is config
            _assert_right(case)
            with off():
                assert _active()  # off does nothing, it does not switch off
        with off():
            assert not _active()
            _assert_refused(case)
    with pytest.raises(ValueError), on():
        raise ValueError
    assert not _active()
    assert current_state().config == ParallelismConfig()
    for enabled, expected in ((True, True), (False, False)):
        with get_train_context(enabled)():
            assert _active() is expected
