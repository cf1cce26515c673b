"""The entropy's part of statistics and gradients: what needs ``sum_c p_c x_c`` or ``log p_c`` of every class."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.torch._loss_rows import Chunk, exp_rows, zero_rows

__all__ = ["EntropyRows", "expectation"]

_LOWEST = -1e30
"""Stands for minus infinity beside a probability of 0, with which it has to give 0."""


def expectation(exponentials: torch.Tensor, rows: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """``sum_c e_c (x_c - anchor)`` of each row."""
    centred = torch.sub(rows, anchor[:, None], out=torch.empty_like(exponentials))
    return centred.clamp_(min=_LOWEST).mul_(exponentials).sum(1)


class EntropyRows:
    """``d H / d x_c = -p_c (log p_c + H)`` for an upstream gradient a token.

    With ``e_c = exp(x_c - anchor)`` this is ``e_c (constant + factor log p_c)``, to whose constant the loss adds its
    own.

    Attributes:
        constant: per token.
        at_target: per token, the gradient of the target's logit.
    """

    def __init__(self, upstream: torch.Tensor, state: Any) -> None:
        self._state = state
        self._factor = -upstream * state.unit
        self.constant = self._factor * state.entropy
        self.at_target = upstream * torch.exp(-state.nll) * (state.nll - state.entropy)

    def exp_times_slope(self, chunk: Chunk, rows: torch.Tensor, constant: torch.Tensor) -> None:
        """``e_c (constant + factor log p_c)`` into the chunk's buffer."""
        part = slice(chunk.start, chunk.stop)
        factor, own = self._factor[part], constant[part]
        slope = torch.empty_like(chunk.buffer)
        torch.sub(rows, self._state.reference[part, None], out=slope)
        slope.sub_(self._state.log_sum_exp[part, None]).clamp_(min=_LOWEST)
        slope.mul_(factor[:, None]).add_(own[:, None])
        exp_rows(rows, self._state.anchor[part], chunk.buffer)
        chunk.buffer.mul_(slope)
        zero_rows(chunk.buffer, (factor == 0) & (own == 0))
