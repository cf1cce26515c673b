"""The compiled kernels against float64, for each set of instructions that this processor has."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hyper_parallel.platform.native import rows as native
from hyper_parallel.platform.native.rows import DTYPES, TARGETS, Matrix, RowKernels

Array = NDArray[np.generic]
_LIBRARY = native.load_library()
_EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_SMALLEST = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}
"""Below these a number may become 0, or the other of the two next to it."""

needs_library = pytest.mark.skipif(_LIBRARY is None, reason="needs a C compiler when the library is installed")


def _kernels(target: int) -> RowKernels:
    assert _LIBRARY is not None
    if target > _LIBRARY.hyper_parallel_best_target():
        pytest.skip(f"needs a processor with {TARGETS[target]}")
    return RowKernels(_LIBRARY, target)


def _stored(x: NDArray[np.float64], dtype: str) -> Array:
    """Rounded once, to the nearest; bfloat16 as its bits."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _values(x: Array, dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def _matrix(x: Array, dtype: str) -> Matrix:
    return Matrix(x.ctypes.data, x.strides[0], *x.shape, dtype)


def _statistics(
    kernels: RowKernels, x: Array, dtype: str, needed: NDArray[np.bool_] | None = None, threads: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    maximum, sum_exp = np.full((2, len(x)), 7, np.float32)
    address = None if needed is None else needed.ctypes.data
    kernels.statistics(_matrix(x, dtype), address, maximum.ctypes.data, sum_exp.ctypes.data, threads)
    return maximum, sum_exp


def _gradients(
    kernels: RowKernels, x: Array, dtype: str, anchor: Array, factor: Array, out: Array, threads: int = 1
) -> None:
    kernels.gradients(_matrix(x, dtype), anchor.ctypes.data, factor.ctypes.data, _matrix(out, dtype), threads)


@needs_library
@pytest.mark.parametrize("target", range(len(TARGETS)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 3, 16, 63, 1000, 8192, 9001])
def test_against_float64(target: int, dtype: str, classes: int) -> None:
    kernels = _kernels(target)
    rng = np.random.default_rng(classes)
    wide = _stored(5 * rng.standard_normal((6, classes + 3)) + rng.uniform(-60, 60, (6, 1)), dtype)
    x = wide[:, 2 : classes + 2]  # rows that start anywhere, further apart than they are long
    exact = _values(x, dtype)
    maximum, sum_exp = _statistics(kernels, x, dtype)
    np.testing.assert_array_equal(maximum, exact.max(1))
    # what the subtraction loses is no fault of the exponential
    distance = (exact - exact.max(1, keepdims=True)).astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(sum_exp, np.exp(distance).sum(1), rtol=8 * _EPS["float32"])  # exp 2, the sum 6

    factor = rng.uniform(-2, 2, 6).astype(np.float32)
    out = np.zeros_like(x)
    _gradients(kernels, x, dtype, maximum, factor, out)
    want = np.exp(distance) * factor[:, None].astype(np.float64)
    error = np.abs(_values(out, dtype) - want)
    tolerance = 2.5 * _EPS["float32"] + _EPS[dtype] * (dtype != "float32")
    assert (error <= tolerance * np.abs(want) + _SMALLEST[dtype] * (1 + 1e-6)).all(), (error / np.abs(want)).max()

    before = wide.copy()
    _gradients(kernels, x, dtype, maximum, factor, x)
    np.testing.assert_array_equal(x, out)
    np.testing.assert_array_equal(wide[:, :2], before[:, :2])
    np.testing.assert_array_equal(wide[:, -1], before[:, -1])


@needs_library
@pytest.mark.parametrize("target", range(len(TARGETS)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite(target: int, dtype: str) -> None:
    kernels = _kernels(target)
    rows = np.tile(np.linspace(-3, 3, 70), (6, 1))
    rows[0] = -np.inf
    rows[1, :69] = -np.inf
    rows[2, 40] = np.nan
    rows[3, 5] = np.inf
    rows[4] = [np.nan, -np.inf] * 35
    x = _stored(rows, dtype)
    maximum, sum_exp = _statistics(kernels, x, dtype)
    last = _values(x, dtype)[5].max()
    np.testing.assert_array_equal(maximum, np.array([-np.inf, last, np.nan, np.inf, np.nan, last], np.float32))
    np.testing.assert_array_equal(sum_exp[[0, 1, 2, 3, 4]], [0, 1, np.nan, np.nan, np.nan])
    out = np.ones_like(x)
    _gradients(kernels, x, dtype, np.where(np.isneginf(maximum), np.float32(0), maximum), np.ones(6, np.float32), out)
    got = _values(out, dtype)
    assert (got[0] == 0).all() and (got[1, :69] == 0).all() and got[1, 69] == 1
    assert np.isnan(got[2]).all() and np.isnan(got[3, 5]) and np.isnan(got[4]).all()
    _gradients(kernels, x, dtype, maximum, np.zeros(6, np.float32), out)
    assert (_values(out, dtype) == 0).all()


@needs_library
@pytest.mark.parametrize("target", range(len(TARGETS)))
def test_every_half_precision_number(target: int) -> None:
    """Read and written: with one class a row, the maximum is the value, and the gradient the factor."""
    kernels = _kernels(target)
    every = np.arange(1 << 16, dtype=np.uint16)[:, None]
    for dtype, decoded in (
        ("float16", every.view(np.float16).astype(np.float32)),
        ("bfloat16", (every.astype(np.uint32) << 16).view(np.float32)),
    ):
        maximum, _ = _statistics(kernels, every, dtype)
        np.testing.assert_array_equal(maximum, decoded[:, 0])
        rng = np.random.default_rng(0)
        zeros = np.zeros(1 << 16, np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            tie = (decoded[:, 0] / 2 + np.roll(decoded[:, 0], -1) / 2).astype(np.float32)
            near = decoded[:, 0] * rng.uniform(0.99, 1.01, 1 << 16).astype(np.float32)
        for factor in (decoded[:, 0], tie, near):
            out = np.zeros_like(every)
            _gradients(kernels, np.zeros_like(every), dtype, zeros, factor, out)
            with np.errstate(invalid="ignore", over="ignore"):
                want = _stored(factor.astype(np.float64)[:, None], dtype)
            np.testing.assert_array_equal(_values(out.view(want.dtype), dtype), _values(want, dtype))


@needs_library
@pytest.mark.parametrize("target", range(len(TARGETS)))
@pytest.mark.parametrize("height", [1.0, 14.0, 40.0, 1e4])
def test_a_maximum_that_keeps_rising(target: int, height: float) -> None:
    """What is summed before does not lose a little at every step."""
    kernels = _kernels(target)
    x = np.linspace(0, height, 150_000, dtype=np.float32)[None]
    maximum, sum_exp = _statistics(kernels, x, "float32")
    assert maximum[0] == x.max()
    exact = np.exp(x.astype(np.float64) - x.max()).sum()
    np.testing.assert_allclose(sum_exp, exact, rtol=8 * _EPS["float32"] + height * 2.0**-24 * (height > 16))


@needs_library
def test_rows_that_are_not_needed_and_threads() -> None:
    kernels = _kernels(0)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((37, 40_000)).astype(np.float32)
    needed = rng.uniform(size=37) < 0.5
    alone = _statistics(kernels, x, "float32", needed)
    together = _statistics(kernels, x, "float32", needed, threads=4)
    np.testing.assert_array_equal(alone, together)
    assert (alone[0][~needed] == -np.inf).all() and (alone[1][~needed] == 0).all()
    np.testing.assert_array_equal(alone[0][needed], x.max(1)[needed])
    one, four = np.empty_like(x), np.empty_like(x)
    factor = rng.standard_normal(37).astype(np.float32)
    for out, threads in ((one, 1), (four, 4)):
        _gradients(kernels, x, "float32", x.max(1), factor, out, threads)
    np.testing.assert_array_equal(one, four)


def test_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not built, not of this machine, or switched off: there are none, and no error."""
    native.row_kernels.cache_clear()
    try:
        monkeypatch.setenv(native.SWITCH, "0")
        assert native.row_kernels() is None
        monkeypatch.delenv(native.SWITCH)
        native.row_kernels.cache_clear()
        monkeypatch.setattr(native, "__file__", str(tmp_path / "rows.py"))
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert native.row_kernels() is None
        native.row_kernels.cache_clear()
        for suffix in native.importlib.machinery.EXTENSION_SUFFIXES:
            (tmp_path / f"_rows{suffix}").write_bytes(b"something else")
        assert native.row_kernels() is None and "install again" in native.describe()
        if _LIBRARY is not None:
            monkeypatch.setattr(native, "_INTERFACE", -1)
            monkeypatch.setattr(native, "__file__", _LIBRARY._name)
            native.row_kernels.cache_clear()
            assert native.row_kernels() is None and "install again" in native.describe()
    finally:
        native.row_kernels.cache_clear()


@needs_library
def test_sources_find_what_was_installed_from_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _LIBRARY is not None
    monkeypatch.setattr(native, "__file__", str(tmp_path / "rows.py"))
    monkeypatch.setattr(sys, "path", [str(Path(_LIBRARY._name).parents[3])])
    assert native.load_library() is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the loader of Linux")
@needs_library
def test_it_needs_nothing_but_the_c_library() -> None:
    assert isinstance(_LIBRARY, ctypes.CDLL)
    data = Path(_LIBRARY._name).read_bytes()
    assert b"libpython" not in data and b"libgomp" not in data
