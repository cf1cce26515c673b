"""MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.common import np_dtype
from mindspore.mint.nn.functional import cross_entropy as captured_mint_cross_entropy
from mindspore.ops import cross_entropy as captured_cross_entropy  # by name, before the library is imported

from hyper_parallel import DTensor, get_platform
from tests.conformance.adapters.base import Adapter, Collective, Differentiated

__all__ = ["make_adapter"]

_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_uneven": "all_gather",
    "reduce_scatter_uneven": "reduce_scatter",
    "all_to_all_uneven": "all_to_all",
    "broadcast": "broadcast",
}


def make_adapter() -> Adapter:
    return MindSporeAdapter()


class MindSporeAdapter(Adapter):
    plain_target_dtype = "int32"

    def tensor(self, array: Any, dtype: str) -> Tensor:
        target = np_dtype.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        values = np.array(array)
        if dtype == "bfloat16":
            values = values.astype(np.float32)
        return Tensor(values.astype(target))

    def numpy(self, x: Tensor) -> np.ndarray:
        values = x.asnumpy()
        return values.astype(np.float32) if values.dtype == np_dtype.bfloat16 else values.copy()

    def dtype(self, x: Tensor) -> str:
        return str(x.dtype).lower()

    def value_and_grad(self, function: Callable[[Tensor], Tensor], x: Tensor, upstream: Any = 1.0) -> Differentiated:
        platform = get_platform()
        values: list[Tensor] = []

        def weighted(x: Tensor) -> Tensor:
            value = function(x)
            assert platform.requires_grad(value), "the result is not attached to the graph"
            values.append(value)
            weight = self.tensor(np.broadcast_to(upstream, tuple(value.shape)), self.dtype(value))
            return platform.linear_map(value, lambda _: Tensor(np.float32(0)), lambda _: weight)

        grad = mindspore.grad(weighted)(x)
        return Differentiated(self.numpy(values[0]), self.dtype(values[0]), self.numpy(grad), self.dtype(grad))

    def cross_entropy(self, entry: str, logits: Any, target: Any, **options: Any) -> Any:
        functions = {
            "function": ops.cross_entropy,
            "mint_function": mint.nn.functional.cross_entropy,
            "captured_function": captured_cross_entropy,
            "captured_mint_function": captured_mint_cross_entropy,
            "nll_of_logits": ops.nll_loss,
        }
        modules = {"module": nn.CrossEntropyLoss, "mint_module": mint.nn.CrossEntropyLoss}
        if entry in functions:
            return functions[entry](logits, target, **options)
        if entry == "module" and isinstance(target, Tensor) and target.dtype != mindspore.int32:
            target = target.astype(mindspore.int32)  # all that nn.CrossEntropyLoss takes
        if entry in modules:
            return modules[entry](**options)(logits, target)
        dim = 0 if logits.ndim == 1 else 1
        if entry == "decomposed":
            return ops.nll_loss(ops.log_softmax(logits, dim), target, **options)
        if entry == "decomposed_mint":
            functional = mint.nn.functional
            return functional.nll_loss(functional.log_softmax(logits, dim), target, **options)
        if entry == "decomposed_modules":
            return nn.NLLLoss(**options)(nn.LogSoftmax(dim)(logits), target)
        raise ValueError(f"unknown entry {entry!r}")

    def log_softmax(self, x: Any, dim: int) -> Any:
        return ops.log_softmax(x, dim)

    def nll_loss(self, log_probs: Any, target: Any, **options: Any) -> Any:
        return ops.nll_loss(log_probs, target, **options)

    def loss_functions(self) -> list[Any]:
        return [ops.cross_entropy, ops.log_softmax, ops.nll_loss]

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return ops.reshape(x, shape)

    def transpose(self, x: Tensor) -> Tensor:
        return mint.transpose(x, 0, 1)

    def narrow(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        return get_platform().narrow(x, dim, start, length)

    def wrap(self, entry: str, local: Tensor, mesh: Any, placements: Any, shape: Any) -> Any:
        return DTensor.from_local(local, mesh, placements, shape=shape)

    def unwrap(self, x: Any) -> Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    def kind_of(self, x: Any) -> str:
        return "ours" if isinstance(x, DTensor) else "plain"

    def host_number(self, x: Any) -> float:
        shown, number = x.item(), float(x)
        assert shown == number or (shown != shown and number != number)
        return number

    def elsewhere(self, x: Tensor) -> Tensor:
        raise NotImplementedError("MindSpore has one device in a process")

    @contextmanager
    def record_collectives(self) -> Iterator[list[Collective]]:
        from hyper_parallel.platform.mindspore import collectives

        seen: list[Collective] = []

        def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def run(x: Any, *args: Any) -> Any:
                group = args[-1]
                if group.size > 1:
                    sent = x if isinstance(x, (list, tuple)) else [x]
                    seen.append(Collective(_COLLECTIVES[name], sum(t.nbytes for t in sent)))
                return function(x, *args)

            return run

        replaced = {name: recorded(name, getattr(collectives, name)) for name in _COLLECTIVES}
        with mock.patch.multiple(collectives, **replaced):
            yield seen

    def bytes_kept(self, function: Callable[[Tensor], Tensor], x: Tensor) -> int | None:
        kernels = get_platform().loss_kernels
        states: list[Any] = []
        forward = kernels.distributed_nll_loss_forward

        def spied(*args: Any) -> Any:
            result = forward(*args)
            states.append(result[2])
            return result

        with mock.patch.object(kernels, "distributed_nll_loss_forward", spied):
            mindspore.grad(lambda x: ops.sum(function(x)))(x)
        (state,) = states
        return sum(v.nbytes for v in vars(state).values() if isinstance(v, np.ndarray))
