"""Options, profiles and fixtures of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests import contract_plugin, harness
from tests.harness.platforms import PLATFORMS, select_platforms, why_not_here

# The same few examples every time, so that a run is quick and a failure stays.
settings.register_profile("default", max_examples=25, derandomize=True, deadline=None)
settings.register_profile(
    "nightly",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hyper_parallel")
    group.addoption(
        "--platform", action="append", choices=PLATFORMS, help="run only this platform's tests (repeatable)"
    )
    group.addoption(
        "--write-matrix",
        nargs="?",
        const=contract_plugin.DEFAULT_PAGE,
        metavar="PATH",
        help=f"after a run of the whole suite write the support matrix (default: {contract_plugin.DEFAULT_PAGE}) and "
        f"its data (beside it; by default {contract_plugin.PACKAGE_DATA})",
    )


def pytest_configure(config: pytest.Config) -> None:
    select_platforms(set(config.getoption("platform") or PLATFORMS))
    contract_plugin.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        platform = contract_plugin.platform_of(item)
        if platform and (reason := why_not_here(platform)):
            item.add_marker(pytest.mark.skip(reason=reason))
    # Few groups of workers are alive at once: tests that share one run side by side.
    items.sort(key=_group_of)


def _group_of(item: pytest.Item) -> tuple[str, int]:
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get("world_size", 0) if callspec is not None else 0
    return contract_plugin.platform_of(item) or "", size if isinstance(size, int) else 0


def pytest_sessionfinish() -> None:
    harness.close_all()


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> str:
    """Each platform in turn; skipped where it is not installed or not selected."""
    return request.param


@pytest.fixture
def workers() -> Callable[[str, int], harness.WorkerGroup]:
    """`workers(platform, world_size)` is the shared group of that kind."""
    return harness.workers
