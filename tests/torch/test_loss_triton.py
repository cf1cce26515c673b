"""The Triton kernels, by their interpreter; and what happens where Triton is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hyper_parallel.platform.torch import _loss_fused  # noqa: E402

_ROOT = Path(__file__).resolve().parents[2]


def test_kernels_by_interpreter() -> None:
    """Shapes, dtypes, strides, ignored and infinite rows, in place or not, against float64."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (its wheel is 270 MiB, so the test extra does without)")
    outcome = subprocess.run(
        [sys.executable, "-m", "tests.torch.triton_checks"],
        cwd=_ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_missing_triton_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _loss_fused._load.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Triton is not installed"):
            assert _loss_fused.fused_kernels(1, torch.randn(2, 3)) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _loss_fused.fused_kernels(1, torch.randn(2, 3)) is None
    finally:
        _loss_fused._load.cache_clear()
