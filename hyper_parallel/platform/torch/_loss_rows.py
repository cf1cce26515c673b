"""Walking over class-sharded logits, a few tokens at a time, whatever their shape and strides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = [
    "Chunk",
    "autocast_off",
    "chunks",
    "exp_rows",
    "load_rows",
    "matrices",
    "softmax_rows",
    "statistics_dtype",
    "zero_rows",
]

# Bytes of one chunk in fp32 on accelerators, where it bounds the memory of intermediates, and has to be long enough
# to fill the device.
_ACCELERATOR_CHUNK_BYTES = 1 << 27


class Chunk(NamedTuple):
    """Some consecutive tokens: where they stand in row-major token order, and their rows ``[k, classes]``."""

    start: int
    stop: int
    rows: tuple[torch.Tensor, ...]
    """For each tensor given to :func:`chunks`, a view of it."""
    buffer: torch.Tensor
    """Scratch memory ``[k, classes]``: the statistics' dtype, the rows' stride order; chunks share it."""


def statistics_dtype(logits: torch.Tensor) -> torch.dtype:
    """fp64 for fp64 logits, else fp32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def autocast_off(x: torch.Tensor) -> AbstractContextManager[object]:
    """Statistics stay in the dtype they were given, whatever autocast is on around them."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def matrices(dim: int, *tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Views ``[tokens, classes]`` of tensors of one shape, and the number of their first token.

    Tokens are numbered in row-major order. One matrix where the token dims of all tensors collapse into one
    (contiguous tensors with the classes last); else as few as there must be: for ``[N, C, d1, d2]`` one for
    each of the N. None when there are no elements.
    """
    if tensors[0].numel():
        yield from _matrices(tuple(x.movedim(dim, -1) for x in tensors), 0)


def chunks(dim: int, *tensors: torch.Tensor) -> Iterator[Chunk]:
    """Cut tensors of one shape, whose classes are in ``dim``, into chunks of rows; nothing is copied.

    The strides of the first tensor decide how the scratch memory is laid out.
    """
    classes = tensors[0].shape[dim]
    dtype = statistics_dtype(tensors[0])
    scratch: torch.Tensor | None = None
    for first, group in matrices(dim, *tensors):
        tokens = group[0].shape[0]
        length = min(tokens, _chunk_length(group[0], classes * dtype.itemsize))
        if scratch is None:  # the matrices of a tensor are all of one size
            scratch = torch.empty(length * classes, dtype=dtype, device=group[0].device)
        class_major = group[0].stride(1) != 1 and group[0].stride(0) == 1
        for start in range(0, tokens, length):
            stop = min(start + length, tokens)
            flat = scratch[: (stop - start) * classes]
            buffer = flat.view(classes, -1).t() if class_major else flat.view(-1, classes)
            yield Chunk(first + start, first + stop, tuple(matrix[start:stop] for matrix in group), buffer)


def load_rows(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The rows in ``out``'s dtype: themselves where they have it, else a copy in ``out``.

    Arithmetic on two dtypes at once is several times slower on CPU than a conversion and then arithmetic on one.
    """
    return rows if rows.dtype == out.dtype else out.copy_(rows)


def exp_rows(rows: torch.Tensor, anchor: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """``out = exp(rows - anchor)`` for a finite anchor a row, None: 0; ``rows`` may be ``out``."""
    if anchor is None:
        return torch.exp(load_rows(rows, out), out=out)
    return torch.sub(load_rows(rows, out), anchor[:, None], out=out).exp_()


def softmax_rows(chunk: torch.Tensor, out: torch.Tensor) -> None:
    """``out = softmax(chunk)`` along the classes, in ``out``'s dtype."""
    if out.is_contiguous():
        torch.softmax(chunk, 1, dtype=out.dtype, out=out)
    else:
        torch.softmax(chunk.t(), 0, dtype=out.dtype, out=out.t())


def zero_rows(rows: torch.Tensor, where: torch.Tensor) -> None:
    """Set to 0 the rows where the vector ``where`` is true, NaN or not."""
    if rows.device.type == "cpu":  # touch only those rows
        index = where.nonzero().squeeze(1)
        if index.numel():
            rows.index_fill_(0, index, 0.0)
    else:  # without a device synchronisation
        rows.masked_fill_(where[:, None], 0.0)


def _chunk_length(x: torch.Tensor, row_bytes: int) -> int:
    """How many tokens make a chunk."""
    if x.device.type == "cpu":
        budget = _cpu_chunk_bytes() * torch.get_num_threads()
    else:
        budget = _ACCELERATOR_CHUNK_BYTES
    return max(1, budget // row_bytes)


@lru_cache(None)
def _cpu_chunk_bytes() -> int:
    """A thread's share of a chunk: a quarter of a core's L2 cache.

    There the rows and the scratch memory stay from the first pass to the last. With half of it the backward pass
    measures a fifth slower, with all of it two fifths.
    """
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        cache = int(text.removesuffix("K")) << 10
    except (ValueError, OSError):  # not every system tells
        cache = 1 << 20
    return min(max(cache, 1 << 20) // 4, 1 << 20)


def _matrices(moved: tuple[torch.Tensor, ...], first: int) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """:func:`matrices` of tensors whose last dim is the class dim."""
    token_shape, classes = moved[0].shape[:-1], moved[0].shape[-1]
    try:
        together = tuple(x.view(math.prod(token_shape), classes) for x in moved)
    except RuntimeError:  # the strides of some tensor do not allow it
        step = math.prod(token_shape[1:])
        for i in range(token_shape[0]):
            yield from _matrices(tuple(x[i] for x in moved), first + i * step)
    else:
        yield first, together
