"""Which versions fit together, looked up before MindSpore is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from hyper_parallel.errors import PlatformError

__all__ = ["check_versions"]

_OLDEST = (2, 10)  # docs/versions.md says what was found on 2.9


def check_versions() -> None:
    """Compare the installed versions.

    Raises:
        PlatformError: MindSpore before 2.10, or NumPy 2 beside it (its first operator would raise SystemError).
    """
    mindspore, numpy = _installed("mindspore"), _installed("numpy")
    if mindspore is not None and _numbers(mindspore) < _OLDEST:
        raise PlatformError(f"MindSpore {mindspore} is too old; expected at least {'.'.join(map(str, _OLDEST))}")
    if numpy is not None and _numbers(numpy) >= (2,):
        raise PlatformError(
            f"MindSpore {mindspore} does not work with NumPy {numpy}; expected NumPy below 2 (pip install 'numpy<2')"
        )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # put on the path by hand: nothing is known of it
        return None


def _numbers(text: str) -> tuple[int, ...]:
    parts = []
    for part in text.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)
