"""The largest elements of each row, with a fixed order among equals."""

from __future__ import annotations

import torch

__all__ = ["largest"]

_CHUNK_BYTES = 1 << 25
"""Of the 64-bit keys of a chunk of rows."""


def largest(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest of the last dim, descending, and their places; the first one among equals first.

    ``torch.topk`` leaves open which of equals it takes. So it is given keys that differ: the value's bits, in an order
    of integers that is that of the values, above the place counted from the end. Values of 64 bits are sorted.
    """
    x = x.detach()
    if x.dtype == torch.float64:
        values, index = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k].contiguous(), index[..., :k].contiguous()
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    index = torch.empty((len(rows), k), dtype=torch.int64, device=x.device)
    from_end = torch.arange(size - 1, -1, -1, device=x.device)
    step = max(1, _CHUNK_BYTES // max(8 * size, 1))
    for start in range(0, len(rows), step):
        keys = _ordered(rows[start : start + step].float()).long() * 2**32 + from_end
        top = keys.topk(k, sorted=True).values
        index[start : start + step] = size - 1 - (top & (2**32 - 1))
    return rows.gather(1, index).view(*x.shape[:-1], k), index.view(*x.shape[:-1], k)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of fp32 values: both zeros alike, NaN above everything."""
    bits = (x + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(torch.isnan(x), torch.iinfo(torch.int32).max, ordered)
