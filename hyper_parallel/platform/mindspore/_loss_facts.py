"""The facts of a loss call, read from MindSpore tensors, and the exchange of the ranks' headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from hyper_parallel.platform.loss_facts import FactReader
from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore._host import as_float32, to_host
from hyper_parallel.platform.mindspore.custom_grad import requires_grad
from hyper_parallel.platform.platform import Group

__all__ = ["MindSporeFactReader", "exchange_headers"]


class MindSporeFactReader(FactReader):
    """Values are read on the host."""

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def dtype_name(self, x: Tensor) -> str:
        return str(x.dtype).lower()

    def requires_grad(self, x: Tensor) -> bool:
        return requires_grad(x)

    def is_leaf(self, x: Tensor) -> bool:
        return bool(x._is_leaf) and requires_grad(x)

    def labels(self, target: Tensor) -> NDArray[Any]:
        return to_host(target).reshape(-1).astype(np.int64)

    def weight_bits(self, weight: Tensor) -> NDArray[Any]:
        return as_float32(to_host(weight)).astype(np.float64).view(np.int64)

    def positions(self, like: NDArray[Any]) -> NDArray[Any]:
        return np.arange(like.size, dtype=np.int64)


def exchange_headers(header: Sequence[int], group: Group, like: Tensor) -> list[list[int]]:
    """All-gather int64 values."""
    gathered = collectives.all_gather(Tensor(np.array(header, np.int64)), group)
    rows: list[list[int]] = to_host(gathered).tolist()
    return rows
