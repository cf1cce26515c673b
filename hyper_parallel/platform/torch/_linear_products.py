"""The matrix products of the last layer, with results in fp32 (fp64 for fp64 inputs)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["Products"]

_BLOCK_BYTES = 1 << 24
"""Of a block of the weight's rows in fp32, where it has to be converted."""


class Products:
    """Products with one weight ``[V, H]``, of half precision too.

    On CPU half-precision inputs are converted to fp32, the weight in blocks of rows: the results are those of fp32, and
    faster where the processor has no half-precision products. On accelerators the inputs stay as they are, and results
    are fp32 where the library can, else rounded.
    """

    def __init__(self, weight: torch.Tensor, wide: torch.dtype) -> None:
        self._weight, self._wide = weight, wide
        self._convert = weight.dtype != wide and weight.device.type == "cpu"
        self._half = weight.dtype != wide and not self._convert

    def load(self, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states as the products take them."""
        return rows.to(self._wide) if self._convert else rows

    def logits(self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """``rows @ weight.T + bias``."""
        for start, stop, block in self._blocks():
            if self._half:
                out[:, start:stop] = _wide_product(rows, block.t())
            else:
                torch.mm(rows, block.t(), out=out[:, start:stop])
        if bias is not None:
            out += bias.to(self._wide)

    def add_to_hidden(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """``out += grad @ weight``."""
        for start, stop, block in self._blocks():
            if self._half:
                out += _wide_product(grad[:, start:stop].to(block.dtype), block)
            else:
                out.addmm_(grad[:, start:stop], block)

    def add_to_weight(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """``out += grad.T @ rows``."""
        if not self._half:
            out.addmm_(grad.t(), rows)
            return
        for start, stop, _ in self._blocks():
            out[start:stop] += _wide_product(grad[:, start:stop].t().to(rows.dtype), rows)

    def _blocks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        rows, width = self._weight.shape
        step = rows
        if self._convert or self._half:
            step = max(1, _BLOCK_BYTES * (1 if self._convert else 16) // max(1, width * self._wide.itemsize))
        for start in range(0, rows, max(step, 1)):
            block = self._weight[start : start + step]
            yield start, start + len(block), block.to(self._wide) if self._convert else block


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of half-precision matrices, in fp32."""
    try:
        return torch.mm(a, b, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):  # older releases, other devices
        return (a @ b).float()
