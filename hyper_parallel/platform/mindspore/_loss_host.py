"""The loss kernels' arithmetic on CPU: NumPy on the tensors' own memory.

MindSpore's CPU operators need several passes over temporaries of the logits' size where chunks of rows that stay in the
cache do; broadcasting one number a row over them is its slowest operation. Where the compiled kernels are there, and
know the call, one pass of theirs takes the place of NumPy's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from hyper_parallel.platform.mindspore._entropy_term import LOWEST, EntropyTerm
from hyper_parallel.platform.mindspore._host import BFLOAT16, to_host, to_tensor
from hyper_parallel.platform.mindspore._loss_compiled import compiled_rows

__all__ = ["HostArithmetic"]

Array = NDArray[Any]

# Bytes of a chunk in fp32: with its logits it stays in a core's L2 cache from the first pass over it to the last.
_CHUNK_BYTES = 1 << 18


class _Chunk(NamedTuple):
    """Some consecutive tokens: where they stand in row-major token order, and their rows ``[k, classes]``."""

    start: int
    stop: int
    rows: tuple[Array, ...]
    buffer: Array
    """Scratch memory in the statistics' dtype, shared by all chunks, with the stride order of the rows."""


class HostArithmetic:
    """What :mod:`.loss_kernels` and :mod:`._loss_exchange` compute with. Vectors have one element a token."""

    on_host = True
    exp = staticmethod(np.exp)
    log = staticmethod(np.log)
    expm1 = staticmethod(np.expm1)
    where = staticmethod(np.where)
    concat = staticmethod(np.concatenate)

    # -- vectors ---------------------------------------------------------------------------------------------

    def quietly(self) -> AbstractContextManager[Any]:
        """-inf, NaN and 0/0 are results like others."""
        return np.errstate(all="ignore")

    def enter(self, x: Tensor) -> Array:
        return to_host(x)

    def leave(self, array: Array) -> Tensor:
        return to_tensor(np.asarray(array))

    def integers(self, x: Tensor) -> Array:
        """The values as a vector of int64."""
        return to_host(x).reshape(-1).astype(np.int64)

    def statistics_dtype(self, x: Array) -> Any:
        return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)

    def copy(self, x: Array) -> Array:
        return x.copy()

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.astype(dtype, copy=False)

    def number(self, value: float, dtype: Any) -> Any:
        """A factor that takes part in the vectors' precision."""
        return np.dtype(dtype).type(value)

    def full(self, size: int, value: float, dtype: Any) -> Array:
        return np.full(size, value, dtype)

    def take(self, x: Array, index: Array) -> Array:
        return x[index]

    def clip(self, x: Array, low: int, high: int) -> Array:
        return np.clip(x, low, high)

    def largest(self, x: Array) -> Array:
        """Over the first dim."""
        return np.asarray(x.max(0))

    def total(self, x: Array) -> Array:
        """Over the first dim."""
        return np.asarray(x.sum(0, dtype=x.dtype))

    # -- rows ------------------------------------------------------------------------------------------------

    def row_statistics(
        self, x: Array, dim: int, needed: Array | None, class_weight: Array | None, entropy: bool = False
    ) -> tuple[Array, Array, Array | None, Array | None]:
        """Per token the maximum m, ``sum_c exp(x_c - m)``, for smoothing ``sum_c w_c (m - x_c)``, and for the entropy
        ``sum_c q_c (x_c - m)`` with q the softmax of these classes.
        """
        dtype = self.statistics_dtype(x)
        tokens = math.prod(x.shape[:dim] + x.shape[dim + 1 :])
        maximum = np.full(tokens, -np.inf, dtype)
        sum_exp = np.zeros(tokens, dtype)
        shortfall = None if class_weight is None else np.zeros(tokens, dtype)
        mean = np.zeros(tokens, dtype) if entropy else None
        compiled = None if class_weight is not None or entropy else compiled_rows(dim, x)
        if compiled is not None:
            for start, (rows,) in _matrices(dim, x):
                part = slice(start, start + len(rows))
                compiled.statistics(rows, None if needed is None else needed[part], maximum[part], sum_exp[part])
            return maximum, sum_exp, None, None
        skip = needed is not None and not needed.all()
        for start, stop, (rows,), buffer in _chunks(dim, x):
            if skip and needed is not None and not needed[start:stop].any():
                continue
            maximum[start:stop] = _relative_to_maximum(rows, buffer)
            if shortfall is not None:
                shortfall[start:stop] = -(buffer @ class_weight)
            centred = np.maximum(buffer, LOWEST) if mean is not None else None
            np.exp(buffer, out=buffer)
            sum_exp[start:stop] = _row_sums(buffer)
            if mean is not None and centred is not None:
                total = _row_sums(np.multiply(centred, buffer, out=centred))
                mean[start:stop] = np.where(total == 0, 0, total / sum_exp[start:stop])
        return maximum, sum_exp, shortfall, mean

    def at_index(self, x: Array, dim: int, index: Array) -> Array:
        """Per token ``x`` at its class ``index``, in the statistics' dtype; 0 where that is negative."""
        out = np.zeros(index.shape, self.statistics_dtype(x))
        for start, (rows,) in _matrices(dim, x):
            part = index[start : start + len(rows)]
            (token,) = np.nonzero(part >= 0)
            if token.size:
                out[start + token] = rows[token, part[token]].astype(out.dtype)
        return out

    def log_probs(self, x: Array, dim: int, reference: Array, log_sum_exp: Array, dtype: Any) -> Array:
        """``x_c - reference - log_sum_exp``."""
        out = np.empty(x.shape, x.dtype if dtype is None else _numpy_dtype(dtype))
        for start, stop, (rows, result), buffer in _chunks(dim, x, out):
            np.subtract(_load(rows, buffer), reference[start:stop, None], out=buffer)
            np.subtract(buffer, log_sum_exp[start:stop, None], out=buffer)
            np.copyto(result, buffer, casting="same_kind" if result.dtype.kind == "f" else "unsafe")
        return out

    def gradient(
        self,
        x: Array,
        dim: int,
        factor: Array,
        anchor: Array,
        shift: Array | None,
        weight: Array | None,
        inplace: bool,
        entropy: EntropyTerm | None = None,
    ) -> Array:
        """``factor exp(x_c - anchor) - shift w_c``; rows whose factor is 0 are just ``- shift w_c``.

        With ``entropy``, ``factor + entropy.factor log p_c`` in the place of ``factor``.
        """
        out = x if inplace and x.flags.writeable else np.empty(x.shape, x.dtype)
        compiled = None if entropy is not None or shift is not None else compiled_rows(dim, x, out)
        if compiled is not None:
            for start, (rows, grads) in _matrices(dim, x, out):
                part = slice(start, start + len(rows))
                compiled.gradients(rows, anchor[part], factor[part], grads)
            return out
        for start, stop, (rows, grads), buffer in _chunks(dim, x, out):
            scale = factor[start:stop]
            zero = scale == 0
            slope = scale[:, None]
            if entropy is not None:
                zero = zero & (entropy.factor[start:stop] == 0)
                slope = entropy.slope(_load(rows, buffer), slope, start, stop)
            target = grads if grads.dtype == buffer.dtype else buffer
            if zero.all():
                target[...] = 0
            else:
                np.subtract(_load(rows, buffer), anchor[start:stop, None], out=target)
                np.exp(target, out=target)
                np.multiply(target, slope, out=target)
                if zero.any():
                    target[zero] = 0
            if shift is not None:
                row_shift = shift[start:stop, None]
                np.subtract(target, row_shift if weight is None else row_shift * weight, out=target)
            if target is not grads:
                grads[...] = target.astype(grads.dtype)
        return out

    def log_softmax_gradient(self, x: Array, dim: int, grad: Array, factor: Array) -> Array:
        """``grad_c - factor softmax(x)_c``, the softmax over this rank's classes."""
        out = np.empty(x.shape, x.dtype)
        for start, stop, (rows, upstream, grads), buffer in _chunks(dim, x, grad, out):
            scale = factor[start:stop]
            _relative_to_maximum(rows, buffer)
            np.exp(buffer, out=buffer)
            np.multiply(buffer, (scale / _row_sums(buffer))[:, None], out=buffer)
            buffer[scale == 0] = 0
            np.subtract(upstream.astype(buffer.dtype, copy=False), buffer, out=buffer)
            grads[...] = buffer.astype(grads.dtype, copy=False)
        return out

    def row_totals(self, x: Array, dim: int) -> Array:
        """Per token the sum over the classes, in the statistics' dtype."""
        out = np.zeros(math.prod(x.shape[:dim] + x.shape[dim + 1 :]), self.statistics_dtype(x))
        for start, stop, (rows,), buffer in _chunks(dim, x):
            out[start:stop] = _row_sums(_load(rows, buffer))
        return out

    def put_at_index(self, x: Array, dim: int, index: Array, values: Array) -> Array:
        """Set ``x`` at each token's class ``index``, where that is not negative; in place."""
        for start, (rows,) in _matrices(dim, x):
            part = index[start : start + len(rows)]
            (token,) = np.nonzero(part >= 0)
            if token.size:
                rows[token, part[token]] = values[start + token].astype(x.dtype)
        return x

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return np.zeros(shape, like.dtype)


def _relative_to_maximum(rows: Array, out: Array) -> Array:
    """``out = rows - m``; returns m, which counts as 0 where it is -inf (no class, or nothing but -inf)."""
    values = _load(rows, out)
    maximum: Array = values.max(1)
    np.subtract(values, np.where(maximum == -np.inf, 0, maximum).astype(out.dtype)[:, None], out=out)
    return maximum


def _load(rows: Array, buffer: Array) -> Array:
    """The rows in the buffer's dtype."""
    if rows.dtype == buffer.dtype:
        return rows
    buffer[...] = rows.astype(buffer.dtype)
    return buffer


def _row_sums(values: Array) -> Array:
    # along contiguous memory NumPy adds pairwise, which is exact enough; across it one after the other
    along = values.strides[1] <= values.strides[0]
    sums: Array = values.sum(1) if along else values.sum(1, dtype=np.float64)
    return sums


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    return BFLOAT16 if dtype == mindspore.bfloat16 else np.dtype(mindspore.dtype_to_nptype(dtype))


def _matrices(dim: int, *arrays: Array) -> Iterator[tuple[int, tuple[Array, ...]]]:
    """Views ``[tokens, classes]`` of arrays of one shape, with the number of their first token in row-major order.

    One matrix where the token dims of all arrays collapse into one; for ``[N, C, d1, d2]`` one for each of the N.
    """
    if arrays[0].size:
        yield from _split(tuple(np.moveaxis(a, dim, -1) for a in arrays), 0)


def _split(moved: tuple[Array, ...], first: int) -> Iterator[tuple[int, tuple[Array, ...]]]:
    token_shape, classes = moved[0].shape[:-1], moved[0].shape[-1]
    together = tuple(_as_matrix(a, math.prod(token_shape), classes) for a in moved)
    if all(a is not None for a in together):
        yield first, together  # type: ignore[misc]
        return
    step = math.prod(token_shape[1:])
    for i in range(token_shape[0]):
        yield from _split(tuple(a[i] for a in moved), first + i * step)


def _as_matrix(a: Array, tokens: int, classes: int) -> Array | None:
    view = a.view()
    try:
        view.shape = (tokens, classes)
    except AttributeError:  # the strides do not allow it
        return None
    return view


def _chunks(dim: int, *arrays: Array) -> Iterator[_Chunk]:
    """Cut arrays of one shape into chunks of rows; nothing is copied."""
    classes = arrays[0].shape[dim]
    dtype = np.float64 if arrays[0].dtype == np.float64 else np.float32
    scratch: Array | None = None
    for first, group in _matrices(dim, *arrays):
        tokens = group[0].shape[0]
        length = min(tokens, max(1, _CHUNK_BYTES // (classes * np.dtype(dtype).itemsize)))
        if scratch is None:  # all matrices of an array are of one size
            scratch = np.empty(length * classes, dtype)
        class_major = group[0].strides[0] < group[0].strides[1]
        for start in range(0, tokens, length):
            stop = min(start + length, tokens)
            flat = scratch[: (stop - start) * classes]
            buffer = flat.reshape(classes, -1).T if class_major else flat.reshape(-1, classes)
            yield _Chunk(first + start, first + stop, tuple(m[start:stop] for m in group), buffer)
