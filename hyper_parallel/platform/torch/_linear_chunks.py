"""Last layer and loss, a chunk of tokens after the other, without autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hyper_parallel.platform.functional import LinearLoss
from hyper_parallel.platform.torch._linear_products import Products
from hyper_parallel.platform.torch._loss_forward import distributed_nll_loss_forward
from hyper_parallel.platform.torch._loss_gradients import cross_entropy_grad

__all__ = ["Gradients", "run_chunks"]

_CPU_CHUNK_BYTES = 1 << 26
_ACCELERATOR_CHUNK_BYTES = 1 << 29
_CHUNKS = 8
"""An eighth of the logits at a time, if that is at least ``_FEWEST`` tokens: each chunk reads the weight twice and its
gradient once, which short chunks pay for."""
_FEWEST = 64


@dataclass
class Gradients:
    """Of the hidden states (a term of a sum over the ranks), the weight and the bias; None where not asked for.

    In fp32 (fp64 for fp64 inputs).
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def zeros(
        cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Sequence[bool]
    ) -> Gradients:
        """To be added to."""
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return cls(
            torch.zeros_like(hidden, dtype=wide) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs[1] else None,
            torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None,
        )


def run_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: LinearLoss,
    factor: torch.Tensor | None,
    into: Gradients | None,
) -> torch.Tensor:
    """The loss of each token ``[T]``; adds to ``into`` the gradients of the losses' sum, weighted by ``factor [T]``.

    Collectives: for each chunk, the exchange of the loss's statistics.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    products = Products(weight, wide)
    options = replace(loss.options, inplace=into is not None)
    for start, stop, buffer in _chunks(hidden, weight, loss, wide):
        rows = products.load(hidden[start:stop])
        products.logits(rows, bias, out=buffer)
        if loss.softcap is not None:
            buffer.div_(loss.softcap).tanh_()
            slope = (1.0 - buffer.square()) if into is not None else None
            buffer.mul_(loss.softcap)
        losses[start:stop], _, state = distributed_nll_loss_forward(
            buffer, 1, target[start:stop], loss.shard, None, options
        )
        if into is None or factor is None:
            continue
        cross_entropy_grad(factor[start:stop], buffer, 1, state)  # in place
        if loss.softcap is not None and slope is not None:
            buffer.mul_(slope)
        if into.hidden is not None:
            products.add_to_hidden(buffer, out=into.hidden[start:stop])
        if into.weight is not None:
            products.add_to_weight(buffer, rows, out=into.weight)
        if into.bias is not None:
            into.bias += buffer.sum(0)
    return losses


def _chunks(
    hidden: torch.Tensor, weight: torch.Tensor, loss: LinearLoss, dtype: torch.dtype
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Where chunks of tokens start and stop, and memory for their logits."""
    tokens, classes = len(hidden), len(weight)
    length = loss.chunk_size or _chunk_length(hidden, classes, loss, dtype)
    memory = torch.empty(min(length, tokens), classes, dtype=dtype, device=hidden.device)
    for start in range(0, tokens, length):
        stop = min(start + length, tokens)
        yield start, stop, memory[: stop - start]


def _chunk_length(hidden: torch.Tensor, classes: int, loss: LinearLoss, dtype: torch.dtype) -> int:
    """Equal on all ranks, which exchange statistics chunk by chunk."""
    budget = _CPU_CHUNK_BYTES if hidden.device.type == "cpu" else _ACCELERATOR_CHUNK_BYTES
    widest = max(stop - start for start, stop in loss.shard.ranges) if loss.shard.ranges else classes
    most = budget // max(1, widest * dtype.itemsize * (2 if loss.softcap is not None else 1))
    return max(1, min(most, max(_FEWEST, -(-len(hidden) // _CHUNKS))))
