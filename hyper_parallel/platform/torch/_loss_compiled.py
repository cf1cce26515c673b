"""The compiled kernels on PyTorch's CPU tensors, with the interface of the Triton ones."""

from __future__ import annotations

import torch

from hyper_parallel.platform.native.rows import DTYPES, Matrix, RowKernels

__all__ = ["CompiledKernels", "takes"]

_NAMES = {getattr(torch, name): name for name in DTYPES}


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels know the dtype, and there is memory that holds the values as they are.

    Other classes of tensors may keep their values elsewhere, as fake ones and wrappers do, and tell of address 0.
    """
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.dtype not in _NAMES:
        return False
    return not x.is_neg() and not x._is_zerotensor()


class CompiledKernels:
    """On as many threads as PyTorch's own operators use."""

    def __init__(self, kernels: RowKernels) -> None:
        self._kernels = kernels

    def row_statistics(
        self, rows: torch.Tensor, dtype: torch.dtype, needed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row of ``[tokens, classes]`` the maximum, and the sum of exponentials relative to it (to 0 for -inf).

        Rows that are not ``needed`` are not read.
        """
        maximum, sum_exp = rows.new_empty(2, len(rows), dtype=dtype)
        wanted = None if needed is None else needed.contiguous()
        self._kernels.statistics(
            _matrix(rows),
            None if wanted is None else wanted.data_ptr(),
            maximum.data_ptr(),
            sum_exp.data_ptr(),
            torch.get_num_threads(),
        )
        return maximum, sum_exp

    def row_gradients(self, rows: torch.Tensor, anchor: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        """``out = exp(rows - anchor) factor``, rounded once; 0 in rows of factor 0. ``out`` may be ``rows``."""
        anchor, factor = anchor.contiguous(), factor.contiguous()
        self._kernels.gradients(
            _matrix(rows), anchor.data_ptr(), factor.data_ptr(), _matrix(out), torch.get_num_threads()
        )


def _matrix(x: torch.Tensor) -> Matrix:
    return Matrix(x.data_ptr(), x.stride(0) * x.element_size(), x.shape[0], x.shape[1], _NAMES[x.dtype])
