"""Last layer and loss as a node of MindSpore's autograd (PyNative mode)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, _no_grad, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.functional import LinearLoss
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore._host import BFLOAT16, on_cpu, to_host, to_tensor
from hyper_parallel.platform.mindspore._linear_chunks import Gradients, Products, run_chunks, wide_dtype
from hyper_parallel.platform.mindspore.custom_grad import differentiable_once, requires_grad

__all__ = ["linear_loss"]


def linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: LinearLoss) -> Tensor:
    """See :meth:`LossFunctions.linear_loss`."""
    needs = [x is not None and requires_grad(x) for x in (hidden, weight, bias)]
    result: Tensor = _LinearLoss.apply(hidden, weight, bias, target, loss, needs)
    return result


class _LinearLoss(_Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        loss: LinearLoss,
        needs: Sequence[bool],
    ) -> Tensor:
        work = _Work(hidden, weight, bias, target, loss, needs)
        ctx.work = work
        losses, ctx.grads = work.run(work.factor() if any(needs) and loss.reduction != "none" else None)
        return work.result(losses)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        work, grads, ctx.grads = ctx.work, ctx.grads, None
        scale: Any = 1.0
        if work.loss.reduction == "none":
            _, grads = work.run(work.flat(upstream))
        else:
            scale = float(upstream) if on_cpu() else upstream
            if grads is None:
                _, grads = work.run(work.factor())
        inputs = [x for x in (upstream, work.hidden, work.weight, work.bias) if x is not None]
        found = [
            None if g is None else differentiable_once("linear_cross_entropy", g, *inputs)
            for g in work.finish(grads, scale)
        ]
        return *found, None, None, None


class _Work:
    """What forward and backward share."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        loss: LinearLoss,
        needs: Sequence[bool],
    ) -> None:
        self.hidden, self.weight, self.bias, self.target, self.loss = hidden, weight, bias, target, loss
        self.needs = needs
        self._wide = wide_dtype(hidden)
        self._products = Products(self._wide)

    def run(self, factor: Tensor | None) -> tuple[Any, Gradients | None]:
        """Losses ``[T]`` and the gradients of their sum, weighted by ``factor``."""
        with _no_grad(), np.errstate(all="ignore"):
            hidden = self._moved(self.hidden)
            group = self.loss.shard.group
            if self.loss.sequence_dim is not None and group is not None:
                hidden = collectives.all_gather_uneven(hidden, 0, self._pieces(), group)
            products = self._products
            rows = products.load(hidden).reshape(int(np.prod(self.target.shape)), hidden.shape[-1])
            bias = None if self.bias is None else products.load(self.bias)
            kernels = get_platform().loss_kernels
            labels = self.flat(self.target)
            return run_chunks(
                kernels, rows, products.load(self.weight), bias, labels, self.loss, factor, self._wide, self.needs
            )

    def factor(self) -> Tensor:
        """What each token's loss is multiplied with in the result."""
        labels = to_host(self.flat(self.target)) if on_cpu() else self.flat(self.target)
        kept = labels != self.loss.options.ignore_index
        if self.loss.reduction == "sum":
            return self._full(1.0, labels.shape[0])
        if on_cpu():
            count = int(kept.sum())
            return self._full(1.0 / count if count else np.inf, labels.shape[0])
        return ops.tile(1.0 / kept.astype(self._wide).sum().reshape(1), (labels.shape[0],))

    def result(self, losses: Any) -> Tensor:
        """Reduced, or in the shape of the target."""
        with _no_grad(), np.errstate(all="ignore"):
            if self.loss.reduction == "none":
                shape = self._moved(self.target).shape
                return self._moved_back(self._products.leave(losses).reshape(shape))
            total = losses.sum()
            if self.loss.reduction == "mean":
                factor = self._products.enter(self.factor())
                total = total * factor[0] if losses.shape[0] else total / (total * 0)
            return to_tensor(np.asarray(total, losses.dtype)) if on_cpu() else total

    def finish(self, grads: Gradients, scale: Any) -> list[Tensor | None]:
        """The gradients in shape and dtype of their tensors, that of the hidden states summed over the ranks."""
        with _no_grad(), np.errstate(all="ignore"):
            hidden: Tensor | None = None
            if grads.hidden is not None:
                shape = (*self._moved(self.target).shape, self.hidden.shape[-1])
                hidden = self._summed(self._products.leave((grads.hidden * scale).reshape(shape)))
            found = [hidden]
            for grad, like in ((grads.weight, self.weight), (grads.bias, self.bias)):
                found.append(None if grad is None else _cast(self._products.leave(grad * scale), like))
            return found

    def _summed(self, grad: Tensor) -> Tensor:
        """The terms of the ranks' gradients of the hidden states."""
        group, loss = self.loss.shard.group, self.loss
        if group is not None and group.size > 1:
            if loss.sequence_dim is None:
                grad = collectives.all_reduce(grad, "sum", group)
            else:
                grad = collectives.reduce_scatter_uneven(grad, 0, self._pieces(), group)
        return _cast(self._moved_back(grad), self.hidden)

    def flat(self, x: Tensor) -> Tensor:
        """One number a token, as a vector."""
        return self._moved(x).reshape(-1)

    def _full(self, value: float, size: int) -> Tensor:
        dtype = np.float64 if self._wide == mindspore.float64 else np.float32
        return Tensor.from_numpy(np.full(size, value, dtype))

    def _pieces(self) -> list[int]:
        assert self.loss.sequence_dim is not None and self.loss.shard.group is not None
        length, parts = self.target.shape[self.loss.sequence_dim], self.loss.shard.group.size
        return [stop - start for start, stop in chunk_ranges(length, parts)]

    def _moved(self, x: Tensor) -> Tensor:
        """With the dim that is cut in front."""
        return _swap(x, self.loss.sequence_dim, 0) if self.loss.sequence_dim else x

    def _moved_back(self, x: Tensor) -> Tensor:
        return _swap(x, 0, self.loss.sequence_dim) if self.loss.sequence_dim else x


def _swap(x: Tensor, source: int, destination: int) -> Tensor:
    if on_cpu():
        return to_tensor(np.moveaxis(to_host(x), source, destination))
    return ops.movedim(x, source, destination)


def _cast(x: Tensor, like: Tensor) -> Tensor:
    if not on_cpu():
        return x.astype(like.dtype)
    host = to_host(x)
    dtype = BFLOAT16 if str(like.dtype) == "BFloat16" else to_host(like).dtype
    return x if host.dtype == dtype else to_tensor(host.astype(dtype))
