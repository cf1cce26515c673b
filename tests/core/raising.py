"""Expecting an exception inside a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> str:
    """The message of the exception that ``call`` has to raise."""
    try:
        call()
    except kind as error:
        if text not in str(error):
            raise AssertionError(f"expected {text!r} in the message, found: {error}") from error
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
