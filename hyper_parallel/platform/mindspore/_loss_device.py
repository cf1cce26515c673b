"""The loss kernels' arithmetic on an accelerator: MindSpore operators, no host synchronisation.

Numbers per row are tiled to the rows' shape before they meet the rows: operators on equal shapes are fused and fast
everywhere, broadcasting is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mindspore
from mindspore import Tensor, _no_grad, ops

from hyper_parallel.platform.mindspore._entropy_term import LOWEST, EntropyTerm

__all__ = ["DeviceArithmetic"]

# Bytes of a chunk of rows in fp32: bounds the memory of temporaries, and is long enough to fill the device.
_CHUNK_BYTES = 1 << 27


class DeviceArithmetic:
    """The same as :class:`._loss_host.HostArithmetic`, on tensors."""

    on_host = False
    exp = staticmethod(ops.exp)
    log = staticmethod(ops.log)
    expm1 = staticmethod(ops.expm1)
    where = staticmethod(ops.where)
    concat = staticmethod(ops.concat)

    # -- vectors ---------------------------------------------------------------------------------------------

    def quietly(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _no_grad()
        return context

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x

    def integers(self, x: Tensor) -> Tensor:
        return x.reshape(-1).astype(mindspore.int64)

    def statistics_dtype(self, x: Tensor) -> Any:
        return mindspore.float64 if x.dtype == mindspore.float64 else mindspore.float32

    def copy(self, x: Tensor) -> Tensor:
        return x  # tensors are values here

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return x.astype(dtype)

    def number(self, value: float, dtype: Any) -> Tensor:
        return Tensor(value, dtype)  # a Python number would be rounded to fp32

    def full(self, size: int, value: float, dtype: Any) -> Tensor:
        return ops.full((size,), value, dtype=dtype)

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        return ops.gather(x, index, 0)

    def clip(self, x: Tensor, low: int, high: int) -> Tensor:
        return ops.clamp(x, low, high)

    def largest(self, x: Tensor) -> Tensor:
        return ops.amax(x, 0)

    def total(self, x: Tensor) -> Tensor:
        return ops.sum(x, 0)

    # -- rows ------------------------------------------------------------------------------------------------

    def row_statistics(
        self, x: Tensor, dim: int, needed: Tensor | None, class_weight: Tensor | None, entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        dtype = self.statistics_dtype(x)
        tokens = math.prod(x.shape[:dim] + x.shape[dim + 1 :])
        if x.size == 0:
            zeros = ops.zeros((tokens,), dtype)
            shortfall, mean = None if class_weight is None else zeros, zeros if entropy else None
            return self.full(tokens, -math.inf, dtype), zeros, shortfall, mean
        parts = []
        for rows in self._row_chunks(self._matrix(x, dim)):
            maximum, shifted = self._relative_to_maximum(rows.astype(dtype))
            exp = ops.exp(shifted)
            parts.append([maximum, ops.sum(exp, 1)])
            if entropy:
                total = ops.sum(ops.maximum(shifted, self.number(LOWEST, dtype)) * exp, 1)
                parts[-1].append(ops.where(total == 0, total, total / parts[-1][1]))
            if class_weight is not None:
                weights = ops.tile(class_weight.reshape(1, -1), (rows.shape[0], 1))
                parts[-1].append(-ops.sum(shifted * weights, 1))
        columns = [ops.concat(column) if len(column) > 1 else column[0] for column in zip(*parts)]
        shortfall = columns[-1] if class_weight is not None else None
        return columns[0], columns[1], shortfall, columns[2] if entropy else None

    def at_index(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        dtype = self.statistics_dtype(x)
        if x.size == 0:
            return ops.zeros(index.shape, dtype)
        column = ops.clamp(index, 0, None).astype(mindspore.int64).reshape(-1, 1)
        found = ops.gather_elements(self._matrix(x, dim), 1, column).reshape(-1).astype(dtype)
        return ops.where(index >= 0, found, ops.zeros_like(found))

    def log_probs(self, x: Tensor, dim: int, reference: Tensor, log_sum_exp: Tensor, dtype: Any) -> Tensor:
        out = x.dtype if dtype is None else dtype

        def one(rows: Tensor, reference: Tensor, log_sum_exp: Tensor) -> Tensor:
            shifted = rows.astype(reference.dtype) - self._spread(reference, rows)
            return (shifted - self._spread(log_sum_exp, rows)).astype(out)

        return self._map_rows(one, x, dim, out, reference, log_sum_exp)

    def gradient(
        self,
        x: Tensor,
        dim: int,
        factor: Tensor,
        anchor: Tensor,
        shift: Tensor | None,
        weight: Tensor | None,
        inplace: bool,
        entropy: EntropyTerm | None = None,
    ) -> Tensor:
        def one(rows: Tensor, factor: Tensor, anchor: Tensor, *more: Tensor) -> Tensor:
            wide, shifts = rows.astype(factor.dtype), more
            shifted = wide - self._spread(anchor, rows)
            scale = self._spread(factor, rows)
            if entropy is not None:
                own, reference, log_sum_exp = (self._spread(v, rows) for v in more[:3])
                log_probs = ops.maximum(wide - reference - log_sum_exp, self.number(LOWEST, factor.dtype))
                scale, shifts = scale + own * log_probs, more[3:]
            grads = ops.where(scale == 0, ops.zeros_like(scale), ops.exp(shifted) * scale)
            if shifts:
                moved = self._spread(shifts[0], rows)
                if weight is not None:
                    moved = moved * ops.tile(weight.reshape(1, -1), (rows.shape[0], 1))
                grads = grads - moved
            return grads.astype(x.dtype)

        vectors = (*(entropy or ()), *(() if shift is None else (shift,)))
        return self._map_rows(one, x, dim, x.dtype, factor, anchor, *vectors)

    def log_softmax_gradient(self, x: Tensor, dim: int, grad: Tensor, factor: Tensor) -> Tensor:
        upstream = self._matrix(grad, dim) if x.size else grad

        def one(rows: Tensor, factor: Tensor, upstream: Tensor) -> Tensor:
            _, shifted = self._relative_to_maximum(rows.astype(factor.dtype))
            exp = ops.exp(shifted)
            scale = self._spread(factor / ops.sum(exp, 1), rows)
            part = ops.where(self._spread(factor, rows) == 0, ops.zeros_like(exp), exp * scale)
            return (upstream.astype(part.dtype) - part).astype(x.dtype)

        return self._map_rows(one, x, dim, x.dtype, factor, upstream)

    def row_totals(self, x: Tensor, dim: int) -> Tensor:
        dtype = self.statistics_dtype(x)
        if x.size == 0:
            return ops.zeros((math.prod(x.shape[:dim] + x.shape[dim + 1 :]),), dtype)
        sums = [ops.sum(rows.astype(dtype), 1) for rows in self._row_chunks(self._matrix(x, dim))]
        return ops.concat(sums) if len(sums) > 1 else sums[0]

    def put_at_index(self, x: Tensor, dim: int, index: Tensor, values: Tensor) -> Tensor:
        """A tensor that differs from ``x`` at each token's class ``index``, where that is not negative."""
        if x.size == 0:
            return x
        matrix = self._matrix(x, dim)
        column = ops.clamp(index, 0, None).astype(mindspore.int64).reshape(-1, 1)
        kept = ops.gather_elements(matrix, 1, column)
        new = ops.where((index >= 0).reshape(-1, 1), values.astype(x.dtype).reshape(-1, 1), kept)
        return self._unmatrix(ops.tensor_scatter_elements(matrix, column, new, 1), x.shape, dim)

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return ops.zeros(shape, like.dtype)

    # -- shapes ----------------------------------------------------------------------------------------------

    def _relative_to_maximum(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        maximum = ops.amax(rows, 1)
        anchor = ops.where(maximum == -math.inf, ops.zeros_like(maximum), maximum)
        return maximum, rows - self._spread(anchor, rows)

    def _spread(self, vector: Tensor, rows: Tensor) -> Tensor:
        return ops.tile(vector.reshape(-1, 1), (1, rows.shape[1]))

    def _matrix(self, x: Tensor, dim: int) -> Tensor:
        """``[tokens, classes]``."""
        if dim != x.ndim - 1:
            x = ops.movedim(x, dim, -1)
        return x.reshape(-1, x.shape[-1])

    def _unmatrix(self, matrix: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
        token_shape = (*shape[:dim], *shape[dim + 1 :])
        x = matrix.reshape(*token_shape, shape[dim])
        return x if dim == len(shape) - 1 else ops.movedim(x, -1, dim)

    def row_blocks(self, x: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The rows ``[tokens, classes]`` of each range of tokens."""
        matrix = self._matrix(x, dim) if x.size else None
        for start, stop in ranges:
            yield ops.zeros((stop - start, 0), x.dtype) if matrix is None else matrix[start:stop]

    def _row_chunks(self, matrix: Tensor) -> list[Tensor]:
        length = max(1, _CHUNK_BYTES // (4 * matrix.shape[1]))
        if matrix.shape[0] <= length:
            return [matrix]
        return [matrix[start : start + length] for start in range(0, matrix.shape[0], length)]

    def _map_rows(self, one: Any, x: Tensor, dim: int, dtype: Any, *vectors: Tensor) -> Tensor:
        """``one(rows, *parts of the vectors)``, chunk by chunk."""
        if x.size == 0:
            return ops.zeros(x.shape, dtype)
        results, start = [], 0
        for rows in self._row_chunks(self._matrix(x, dim)):
            stop = start + rows.shape[0]
            whole = start == 0 and stop == vectors[0].shape[0]
            results.append(one(rows, *(vectors if whole else (v[start:stop] for v in vectors))))
            start = stop
        matrix = ops.concat(results) if len(results) > 1 else results[0]
        return self._unmatrix(matrix, x.shape, dim)
