"""The losses called by name in MindSpore, PyNative mode."""

from __future__ import annotations

import mindspore
from mindspore import Tensor, _no_grad, ops

from hyper_parallel.platform.functional import LinearLoss, LossFunctions
from hyper_parallel.platform.mindspore._host import on_cpu, to_host, to_tensor
from hyper_parallel.platform.mindspore._largest import largest
from hyper_parallel.platform.mindspore._linear_loss import linear_loss

__all__ = ["MindSporeLossFunctions", "create_loss_functions"]


def create_loss_functions() -> LossFunctions:
    """Build them."""
    return MindSporeLossFunctions()


class MindSporeLossFunctions(LossFunctions):
    """On CPU in NumPy, elsewhere with operators."""

    def linear_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: LinearLoss
    ) -> Tensor:
        return linear_loss(hidden, weight, bias, target, loss)

    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if on_cpu():
            values, index = largest(to_host(x), k)
            return to_tensor(values), to_tensor(index)
        with _no_grad():
            values, index = ops.topk(x, k, dim=-1, sorted=True)
            return values, index.astype(mindspore.int64)

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        return ops.gather_elements(x, -1, index)
