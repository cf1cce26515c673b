"""Versions that do not fit together are named at once. Needs no framework."""

from __future__ import annotations

import pytest

from hyper_parallel import PlatformError
from hyper_parallel.platform.mindspore import _versions


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    monkeypatch.setattr(_versions, "_installed", versions.get)


def test_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, mindspore="2.10.0", numpy="2.2.6")
    with pytest.raises(PlatformError, match=r"MindSpore 2\.10\.0 does not work with NumPy 2\.2\.6; .*'numpy<2'"):
        _versions.check_versions()


@pytest.mark.parametrize("version", ["2.9.0", "2.3.1rc1", "1.10.1"])
def test_old_mindspore(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, mindspore=version, numpy="1.26.4")
    with pytest.raises(PlatformError, match=f"MindSpore {version} is too old; expected at least 2.10"):
        _versions.check_versions()


@pytest.mark.parametrize("version", ["2.10.0", "2.10.1rc2", "2.11.0", "3.0.0", None])
def test_good_versions(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    installed(monkeypatch, mindspore=version, numpy="1.26.4")
    _versions.check_versions()
