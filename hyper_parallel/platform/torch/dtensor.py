"""The tensor class under DTensor: PyTorch's ``__torch_function__`` leads every operator to the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["TensorBase", "as_dtensor", "as_local", "call_local", "local_mode"]

local_mode = torch._C.DisableTorchFunctionSubclass
"""Inside it DTensors behave as the local tensors that they are."""


class TensorBase(torch.Tensor):
    """A local shard whose operators go to ``cls._dispatch``."""

    _layout: Any

    @classmethod
    def _dispatch(cls, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError(f"{cls.__name__} must define _dispatch")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls._dispatch(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._layout.shape)

    @property
    def grad(self) -> Any:
        with local_mode():
            grad = torch.Tensor.grad.__get__(self)
        if grad is None or type(grad) is type(self):
            return grad
        return as_dtensor(type(self), grad, self._layout.gradient_layout)

    @grad.setter
    def grad(self, value: Any) -> None:
        with local_mode():
            torch.Tensor.grad.__set__(self, None if value is None else as_local(value))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def as_dtensor(cls: type, local: torch.Tensor, layout: Any, *, fresh: bool = False) -> Any:
    """Dress ``local`` with ``layout``, on the same autograd graph and storage."""
    if fresh and type(local) is torch.Tensor:
        local.__class__ = cls  # an alias would cost another autograd node on every operator
        out = local
    else:
        with local_mode():
            out = local.as_subclass(cls)  # type: ignore[arg-type]
    out._layout = layout  # type: ignore[attr-defined]
    return out


def as_local(x: torch.Tensor) -> torch.Tensor:
    """The plain local tensor, on the same autograd graph."""
    if not isinstance(x, TensorBase):
        return x
    with local_mode():
        return x.as_subclass(torch.Tensor)


def call_local(op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the local tensors."""
    with local_mode():
        return op_call(*args, **kwargs)
