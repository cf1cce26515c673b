"""Two Triton kernels for accelerators: a row's statistics in one read, its gradient in one read and one write.

A program works on one row (one token), a block of classes at a time, as online softmax does: it carries the maximum and
the sum of exponentials relative to it. Arithmetic is in the statistics' dtype, whatever the logits' is. Any row length
and any row stride; classes have to lie next to each other.

With ``TRITON_INTERPRET=1`` in the environment the same kernels run on the CPU, slowly: so they are tested anywhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["row_gradients", "row_statistics"]

_LARGEST_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _statistics(x, stride, classes, maximum, sum_exp, BLOCK: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    base = x + row * stride
    highest = tl.full((), -float("inf"), DTYPE)
    total = tl.full((), 0.0, DTYPE)
    for start in range(0, classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(base + at, mask=at < classes, other=-float("inf")).to(DTYPE)
        # max() drops NaN; the sum below must not
        new = tl.maximum(highest, tl.max(values, 0))
        anchor = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(highest - anchor) + tl.sum(tl.exp(values - anchor), 0)
        highest = new
    tl.store(maximum + row, highest)
    tl.store(sum_exp + row, total)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gradient(x, stride, out, out_stride, classes, anchor, factor, BLOCK: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < classes
    scale = tl.load(factor + row)
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(DTYPE)
    exponentials = tl.exp(values - tl.load(anchor + row))
    # a row with factor 0 is 0 whatever its logits are
    result = tl.where(scale == 0.0, 0.0, exponentials * scale)
    tl.store(out + row * out_stride + at, result.to(out.dtype.element_ty), mask=inside)


def row_statistics(
    rows: torch.Tensor, dtype: torch.dtype, needed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of ``[tokens, classes]`` the maximum, and the sum of exponentials relative to it (to 0 for -inf).

    Of all rows, ``needed`` or not: what decides that would have to be read first.
    """
    tokens, classes = rows.shape
    maximum = rows.new_full((tokens,), -math.inf, dtype=dtype)
    sum_exp = torch.zeros_like(maximum)
    if rows.numel():
        _statistics[(tokens,)](rows, rows.stride(0), classes, maximum, sum_exp, **_settings(classes, dtype))
    return maximum, sum_exp


def row_gradients(rows: torch.Tensor, anchor: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """``out = exp(rows - anchor) factor``, rounded once; 0 in rows of factor 0. ``out`` may be ``rows``."""
    tokens, classes = rows.shape
    if rows.numel():
        settings = _settings(classes, factor.dtype)
        grid = (tokens, triton.cdiv(classes, settings["BLOCK"]))
        _gradient[grid](rows, rows.stride(0), out, out.stride(0), classes, anchor, factor, **settings)


def _settings(classes: int, dtype: torch.dtype) -> dict[str, Any]:
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(classes))
    return {"BLOCK": block, "DTYPE": tl.float64 if dtype == torch.float64 else tl.float32, "num_warps": 8}
