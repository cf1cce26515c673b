"""The tensor class under DTensor: PyTorch's ``__torch_function__`` leads every operator to the dispatcher."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["TensorBase", "as_dtensor", "as_local", "call_local", "local_mode", "opaque"]

local_mode = torch._C.DisableTorchFunctionSubclass
"""Inside it DTensors behave as the local tensors that they are."""


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep ``torch.compile`` out of a function: the code around it is compiled, it runs as it is.

    ``torch.compiler.disable`` does that, but importing the compiler takes seconds; so only once someone else has.
    """

    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable_msg = "operators on DTensors are dispatched, not traced"  # type: ignore[attr-defined]
    return wrapper


class TensorBase(torch.Tensor):
    """A local shard whose operators go to ``cls._dispatch``."""

    _layout: Any

    @classmethod
    def _dispatch(cls, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError(f"{cls.__name__} must define _dispatch")

    @classmethod
    @opaque
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            return _autograd_grad(cls, *args, **(kwargs or {}))
        return cls._dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Never called: operators are caught one level above. Its presence tells ``torch.compile`` not to trace these
        tensors, which it would take for local ones; the code around them is compiled, they run as they are."""
        raise NotImplementedError(f"{func} on {cls.__name__} below the dispatcher")

    @classmethod
    def _skips_dispatch(cls) -> bool:
        """Whether operators see local tensors right now."""
        return False

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if torch._C._is_torch_function_enabled() and not self._skips_dispatch():
            return torch.Size(self._layout.shape)
        with local_mode():  # also inside an operator written in Python, which works on the local tensor
            size: torch.Size = torch.Tensor.shape.__get__(self)  # type: ignore[attr-defined]
        return size

    # Asked often, and the way through __torch_function__ costs ten times as much.

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        with local_mode():
            return torch.Tensor.dtype.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        with local_mode():
            return torch.Tensor.device.__get__(self)  # type: ignore[attr-defined,no-any-return]

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """As of a plain tensor; ``gradient`` lies like this tensor, replicated where this one is Partial.

        Not run in local mode: activation checkpointing repeats the forward pass inside, and dispatches in it.
        """
        seed = None if gradient is None else _gradient_of(gradient, self._layout)
        torch.autograd.backward(as_local(self), seed, retain_graph, create_graph, inputs=inputs)

    @property
    def grad(self) -> Any:
        with local_mode():
            grad = torch.Tensor.grad.__get__(self)  # type: ignore[union-attr]
        if grad is None or type(grad) is type(self):
            return grad
        return as_dtensor(type(self), grad, self._layout.gradient_layout)

    @grad.setter
    def grad(self, value: Any) -> None:
        with local_mode():
            local = None if value is None else _gradient_of(value, self._layout)
            torch.Tensor.grad.__set__(self, local)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _gradient_of(value: Any, layout: Any) -> Any:
    """The local part of a gradient for a tensor with ``layout``."""
    if isinstance(value, TensorBase) and value._layout != layout.gradient_layout:
        raise ValueError(
            f"a gradient of {layout.describe()} lies as {layout.gradient_layout.describe_placements()}; "
            f"found {value._layout.describe()}"
        )
    return as_local(value)


def _autograd_grad(
    cls: type, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """``torch.autograd.grad``; the gradient of a DTensor is a DTensor. Not run in local mode, see ``backward``."""
    outputs, inputs, grad_outputs = (
        tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in (outputs, inputs, grad_outputs)
    )
    with local_mode():  # edges stand for tensors, which would lead here again
        edges = [torch.autograd.graph.get_gradient_edge(x) if isinstance(x, TensorBase) else x for x in inputs]
    seeds = None
    if len(grad_outputs) != 1 or grad_outputs[0] is not None:
        seeds = [
            _gradient_of(g, y._layout) if isinstance(y, TensorBase) else as_local(g)
            for g, y in zip(grad_outputs, outputs, strict=True)
        ]
    grads = torch.autograd.grad([as_local(y) for y in outputs], edges, seeds, *args, **kwargs)
    return tuple(
        as_dtensor(cls, g, x._layout.gradient_layout) if g is not None and isinstance(x, TensorBase) else g
        for g, x in zip(grads, inputs, strict=True)
    )


def as_dtensor(cls: type, local: torch.Tensor, layout: Any, *, fresh: bool = False) -> Any:
    """Dress ``local`` with ``layout``, on the same autograd graph and storage."""
    if not (fresh and type(local) is torch.Tensor):  # an alias costs another autograd node
        with local_mode():
            local = local.view_as(local)
            if type(local) is not torch.Tensor:
                local = local.as_subclass(torch.Tensor)
    local.__class__ = cls
    local._layout = layout  # type: ignore[attr-defined]
    return local


def as_local(x: torch.Tensor) -> torch.Tensor:
    """The plain local tensor, on the same autograd graph."""
    if not isinstance(x, TensorBase):
        return x  # also None
    with local_mode():
        return x.as_subclass(torch.Tensor)


def call_local(op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the local tensors."""
    with local_mode():
        return op_call(*args, **kwargs)
