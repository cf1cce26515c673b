"""PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import DTensor, from_native, to_native
from tests.conformance.adapters.base import Adapter, Collective, Differentiated

__all__ = ["make_adapter"]

_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "all_reduce": "all_reduce",  # the functional ones, which PyTorch's DTensor runs
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def make_adapter() -> Adapter:
    return TorchAdapter()


class TorchAdapter(Adapter):
    def tensor(self, array: Any, dtype: str) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(getattr(torch, dtype))

    def numpy(self, x: torch.Tensor) -> np.ndarray:
        x = x.detach()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy().copy()

    def dtype(self, x: torch.Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def value_and_grad(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, upstream: Any = 1.0
    ) -> Differentiated:
        x = x.detach().requires_grad_()
        value = function(x)
        assert value.requires_grad, "the result is not attached to the graph"
        weight = torch.as_tensor(np.broadcast_to(upstream, tuple(value.shape)).copy()).to(value.dtype)
        value.backward(weight)
        assert x.grad is not None
        return Differentiated(self.numpy(value), self.dtype(value), self.numpy(x.grad), self.dtype(x.grad))

    def cross_entropy(self, entry: str, logits: Any, target: Any, **options: Any) -> Any:
        kind = entry.removeprefix("native_")
        if kind == "function":
            return F.cross_entropy(logits, target, **options)
        if kind == "module":
            return torch.nn.CrossEntropyLoss(**options)(logits, target)
        if kind == "nll_of_logits":
            return F.nll_loss(logits, target, **options)
        dim = 0 if logits.ndim == 1 else 1
        if kind == "decomposed":
            return F.nll_loss(F.log_softmax(logits, dim), target, **options)
        if kind == "decomposed_methods":
            return F.nll_loss(logits.log_softmax(dim), target, **options)
        if kind == "decomposed_modules":
            return torch.nn.NLLLoss(**options)(torch.nn.LogSoftmax(dim)(logits), target)
        raise ValueError(f"unknown entry {entry!r}")

    def loss_functions(self) -> list[Any]:
        aten = torch.ops.aten
        return [
            F.cross_entropy,
            F.log_softmax,
            F.nll_loss,
            torch.log_softmax,
            torch.Tensor.log_softmax,
            torch.special.log_softmax,
            aten.log_softmax.int,
            aten._log_softmax.default,
        ]

    def log_softmax(self, x: Any, dim: int) -> Any:
        return F.log_softmax(x, dim)

    def nll_loss(self, log_probs: Any, target: Any, **options: Any) -> Any:
        return F.nll_loss(log_probs, target, **options)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.view(shape)

    def transpose(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()

    def narrow(self, x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
        return x.narrow(dim, start, length)

    def wrap(self, entry: str, local: torch.Tensor, mesh: Any, placements: Any, shape: Any) -> Any:
        ours = DTensor.from_local(local, mesh, placements, shape=shape)
        return to_native(ours) if entry.startswith("native") else ours

    def unwrap(self, x: Any) -> torch.Tensor:
        kind = self.kind_of(x)
        if kind == "plain":
            return x
        return (from_native(x) if kind == "native" else x).to_local()

    def kind_of(self, x: Any) -> str:
        from torch.distributed.tensor import DTensor as NativeDTensor

        return "ours" if isinstance(x, DTensor) else "native" if isinstance(x, NativeDTensor) else "plain"

    def host_number(self, x: Any) -> float:
        shown, number = x.item(), float(x)
        assert shown == number or (shown != shown and number != number)
        return number

    def elsewhere(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("meta")

    @contextmanager
    def record_collectives(self) -> Iterator[list[Collective]]:
        recorder = _Recorder()
        with recorder:
            yield recorder.seen

    def bytes_kept(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int | None:
        x = x.detach().requires_grad_()
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other tensor gets its address
            return tensor

        alive: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(x)
        kept.pop(x.untyped_storage().data_ptr(), None)
        return sum(kept.values())


class _Recorder(TorchDispatchMode):
    """Sees what reaches the process groups, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name in _COLLECTIVES:
                sent = args[1] if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_") else args[0]
                sent = args[1] if name in ("allgather_", "reduce_scatter_") else sent
                tensors = sent if isinstance(sent, (list, tuple)) else [sent]
                self.seen.append(Collective(_COLLECTIVES[name], sum(t.nbytes for t in tensors)))
            elif name not in ("wait_tensor", "_wrap_tensor_autograd"):
                self.seen.append(Collective(name, 0))
        return func(*args, **(kwargs or {}))
