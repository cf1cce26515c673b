"""Last layer and loss, a chunk of tokens after the other, without autograd.

On CPU the products run in NumPy on the tensors' own memory, elsewhere with operators; the loss of a chunk is that of
the kernels either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from hyper_parallel.platform.functional import LinearLoss
from hyper_parallel.platform.mindspore._host import as_float32, on_cpu, to_host, to_tensor

__all__ = ["Gradients", "Products", "chunk_length", "run_chunks", "wide_dtype"]

_CPU_CHUNK_BYTES = 1 << 26
_ACCELERATOR_CHUNK_BYTES = 1 << 29
_CHUNKS = 8
"""An eighth of the logits at a time, if that is at least ``_FEWEST`` tokens: each chunk reads the weight twice and its
gradient once, which short chunks pay for."""
_FEWEST = 64

Array = Any
"""NumPy's on CPU, else a tensor; fp32 (fp64 for fp64 inputs)."""


@dataclass
class Gradients:
    """Of the hidden states (a term of a sum over the ranks), the weight and the bias; None where not asked for."""

    hidden: Array | None
    weight: Array | None
    bias: Array | None


class Products:
    """The products of the last layer in fp32 (fp64 for fp64 inputs)."""

    def __init__(self, dtype: Any) -> None:
        self.host = on_cpu()
        self._dtype = dtype

    def load(self, x: Tensor) -> Array:
        """The values in the dtype of the products."""
        return as_float32(to_host(x)) if self.host else x.astype(self._dtype)

    def leave(self, x: Array) -> Tensor:
        """A tensor over the same memory."""
        return to_tensor(x) if self.host else x

    def enter(self, x: Tensor) -> Array:
        """The other way round."""
        return to_host(x) if self.host else x

    def zeros(self, shape: tuple[int, ...]) -> Array:
        if self.host:
            return np.zeros(shape, np.float64 if self._dtype == mindspore.float64 else np.float32)
        return ops.zeros(shape, self._dtype)

    def product(self, a: Array, b: Array) -> Array:
        """``a @ b``."""
        if 0 in (*a.shape, *b.shape):
            return self.zeros((a.shape[0], b.shape[1]))
        return np.matmul(a, b) if self.host else ops.matmul(a, b)

    def tanh(self, x: Array) -> Array:
        return np.tanh(x) if self.host else ops.tanh(x)

    def add_product(self, out: Array, a: Array, b: Array) -> Array:
        """``out + a @ b``; on CPU into the memory of ``out``, a few rows at a time."""
        if not self.host:
            return out + self.product(a, b)
        step = max(1, (1 << 24) // max(1, 4 * out.shape[-1]))
        for start in range(0, len(out), step):
            out[start : start + step] += a[start : start + step] @ b
        return out

    def joined(self, parts: list[Array]) -> Array:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if self.host else ops.concat(parts)


def wide_dtype(x: Tensor) -> Any:
    """fp64 for fp64, else fp32."""
    return mindspore.float64 if x.dtype == mindspore.float64 else mindspore.float32


def chunk_length(loss: LinearLoss, tokens: int, classes: int, itemsize: int) -> int:
    """Tokens in a chunk, equal on all ranks, which exchange statistics chunk by chunk."""
    if loss.chunk_size is not None:
        return loss.chunk_size
    widest = max(stop - start for start, stop in loss.shard.ranges) if loss.shard.ranges else classes
    budget = _CPU_CHUNK_BYTES if on_cpu() else _ACCELERATOR_CHUNK_BYTES
    most = budget // max(1, widest * itemsize * (2 if loss.softcap is not None else 1))
    return max(1, min(most, max(_FEWEST, -(-tokens // _CHUNKS))))


def run_chunks(
    kernels: Any,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    labels: Tensor,
    loss: LinearLoss,
    factor: Tensor | None,
    wide: Any,
    needs: Sequence[bool],
) -> tuple[Array, Gradients | None]:
    """The loss of each token ``[T]``, and the gradients of their sum, weighted by ``factor [T]``.

    ``needs`` says for hidden states, weight and bias whether their gradient is asked for.

    Collectives: for each chunk, the exchange of the loss's statistics.
    """
    products = Products(wide)
    tokens, classes = hidden.shape[0], weight.shape[0]
    length = chunk_length(loss, tokens, classes, 8 if wide == mindspore.float64 else 4)
    losses, hidden_grads = [products.zeros((0,))] if not tokens else [], []
    grads = None
    if factor is not None:
        grads = Gradients(
            products.zeros((0, hidden.shape[1])) if needs[0] else None,
            products.zeros(weight.shape) if needs[1] else None,
            products.zeros(bias.shape) if needs[2] and bias is not None else None,
        )
    for start in range(0, tokens, length):
        stop = min(start + length, tokens)
        rows = hidden[start:stop]
        logits = products.product(rows, weight.T)
        if bias is not None:
            logits = logits + bias
        slope = None
        if loss.softcap is not None:
            bent = products.tanh(logits / loss.softcap)
            slope, logits = 1.0 - bent * bent, bent * loss.softcap
        local = products.leave(logits)
        found, _, state = kernels.distributed_nll_loss_forward(
            local, 1, labels[start:stop], loss.shard, None, loss.options
        )
        losses.append(products.enter(found))
        if grads is None or factor is None:
            continue
        grad = products.enter(kernels.fused_nll_log_softmax_backward(factor[start:stop], local, 1, state))
        if slope is not None:
            grad = grad * slope
        if grads.hidden is not None:
            hidden_grads.append(products.product(grad, weight))
        if grads.weight is not None:
            grads.weight = products.add_product(grads.weight, grad.T, rows)
        if grads.bias is not None:
            grads.bias = grads.bias + grad.sum(0)
    if grads is not None and hidden_grads:
        grads.hidden = products.joined(hidden_grads)
    return products.joined(losses), grads
