"""Run the Python blocks of a page; this happens in the workers."""

from __future__ import annotations

import contextlib
import io
from typing import Any


def run_blocks(page: str, blocks: list[tuple[int, str]]) -> list[str]:
    """Execute blocks (first line in the page, source) in one namespace; what each of them printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for line, source in blocks:
        code = compile("\n" * (line - 1) + source, page, "exec")  # a traceback names the line of the page
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        printed.append(out.getvalue())
    return printed
