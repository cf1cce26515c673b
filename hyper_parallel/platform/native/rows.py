"""The compiled kernels over rows of logits, called with addresses: what owns the memory is the caller's business."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["DTYPES", "SWITCH", "TARGETS", "Matrix", "RowKernels", "describe", "load_library", "row_kernels"]

DTYPES = {"float32": (0, 4), "bfloat16": (1, 2), "float16": (2, 2)}
"""What the kernels take: its number there, and bytes an element."""

TARGETS = ("the compiler's default instructions", "AVX2", "AVX-512")
"""What the kernels are compiled for, by number."""

SWITCH = "HYPER_PARALLEL_COMPILED"
"""Environment variable: with 0, the kernels are not used."""

_INTERFACE = 1
"""Of rows.c: a file that an older release has left is not used."""

_FEWEST_BYTES = 1 << 20
"""Of logits for each thread: starting one costs as much as reading some tenths of this."""


@dataclass(frozen=True)
class Matrix:
    """Memory ``[rows, classes]`` whose classes lie next to each other.

    Attributes:
        address: of its first element.
        stride: from row to row, in bytes.
        dtype: a key of :data:`DTYPES`.
    """

    address: int
    stride: int
    rows: int
    classes: int
    dtype: str


class RowKernels:
    """One pass over the logits each way, in fp32 arithmetic.

    Args:
        library: the compiled kernels.
        target: index into :data:`TARGETS`; by default the best that this processor has.
    """

    def __init__(self, library: ctypes.CDLL, target: int | None = None) -> None:
        integer, address, count = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self._statistics = library.hyper_parallel_row_statistics
        self._statistics.argtypes = [integer, integer, address, count, count, count, address, address, address]
        self._statistics.restype = None
        self._gradients = library.hyper_parallel_row_gradients
        self._gradients.argtypes = [integer, integer, address, count, address, count, count, count, address, address]
        self._gradients.restype = None
        self.best_target: int = library.hyper_parallel_best_target()
        self.target = self.best_target if target is None else target

    def statistics(self, x: Matrix, needed: int | None, maximum: int, sum_exp: int, threads: int = 1) -> None:
        """Write each row's maximum, and the sum of its exponentials relative to that (to 0 for a maximum of -inf).

        Args:
            needed: address of a byte a row, 0 for rows to be passed over, which get -inf and 0; None: all are.
            maximum: address of a float32 a row.
            sum_exp: the same.
        """
        number, _ = DTYPES[x.dtype]

        def run(first: int, rows: int) -> None:
            self._statistics(
                *(self.target, number, x.address + first * x.stride, x.stride, rows, x.classes),
                *(None if needed is None else needed + first, maximum + 4 * first, sum_exp + 4 * first),
            )

        _in_threads(run, x, threads)

    def gradients(self, x: Matrix, anchor: int, factor: int, out: Matrix, threads: int = 1) -> None:
        """Write ``exp(x - anchor) factor``, rounded once; 0 in rows of factor 0, whatever ``x`` holds there.

        Args:
            anchor: address of a float32 a row, no less than what the row holds by more than 88.
            factor: the same.
            out: of the dtype of ``x``; may be ``x`` itself.
        """
        number, _ = DTYPES[x.dtype]

        def run(first: int, rows: int) -> None:
            self._gradients(
                *(self.target, number, x.address + first * x.stride, x.stride),
                *(out.address + first * out.stride, out.stride, rows, x.classes),
                *(anchor + 4 * first, factor + 4 * first),
            )

        _in_threads(run, x, threads)


@lru_cache(None)
def row_kernels() -> RowKernels | None:
    """The kernels; None where they were not built, as without a C compiler, or are switched off."""
    library = None if os.environ.get(SWITCH) == "0" else load_library()
    return None if library is None else RowKernels(library)


def describe() -> str:
    """Which kernels are used here, for a reader."""
    kernels = row_kernels()
    if kernels is not None:
        return f"compiled, with {TARGETS[kernels.target]}"
    if os.environ.get(SWITCH) == "0":
        return f"the framework's operators ({SWITCH}=0)"
    why = "what was compiled is of another machine or release: install again"
    if not _files():
        why = "installed without a C compiler"
    return f"the framework's operators, which take two or three times as long ({why})"


def load_library() -> ctypes.CDLL | None:
    """The compiled file beside this one, or that of the installed library, if there is one that loads here."""
    for path in _files():
        with contextlib.suppress(OSError, AttributeError):  # of another machine or release
            library = ctypes.CDLL(str(path))
            if library.hyper_parallel_rows_interface() == _INTERFACE:
                return library
    return None


def _files() -> list[Path]:
    names = [f"_rows{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    # in a clone the sources come before what was installed from them, and only that was compiled
    folders = [Path(__file__).parent, *(Path(entry) / "hyper_parallel/platform/native" for entry in sys.path)]
    return [path for folder in folders for name in names if (path := folder / name).exists()]


def _in_threads(run: Callable[[int, int], Any], x: Matrix, threads: int) -> None:
    """``run(first row, rows)`` for parts of the rows; ctypes lets go of Python's lock meanwhile."""
    size = x.rows * x.classes * DTYPES[x.dtype][1]
    parts = max(1, min(threads, x.rows, size // _FEWEST_BYTES))
    bounds = [x.rows * i // parts for i in range(parts + 1)]
    others = [threading.Thread(target=run, args=(a, b - a)) for a, b in zip(bounds[1:-1], bounds[2:], strict=True)]
    started: list[threading.Thread] = []
    try:
        for thread in others:
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had
                thread.run()
            else:
                started.append(thread)
        run(0, bounds[1])
    finally:  # an interrupt must not free memory that is still written to
        for thread in started:
            thread.join()
