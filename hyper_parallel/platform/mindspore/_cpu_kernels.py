"""Operators on local tensors whose CPU kernels are wrong or missing, computed another way.

- Tensors without elements, which a rank has when there is less to share than ranks: MindSpore leaves sums over nothing
  uninitialised, and many gradient operators raise, on that rank alone. Here such sums are zero, and what is made of
  nothing gets a gradient of zeros, so that the rank goes on to take part in the collectives of the backward pass.
- log_softmax: MindSpore's gradient is off by 1e-4, and the newer primitive has no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspore import Tensor, _no_grad, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.platform.mindspore._host import on_cpu
from hyper_parallel.platform.mindspore.custom_grad import as_input, requires_grad

__all__ = ["call", "concat"]

_OF_NOTHING = {
    **dict.fromkeys(("SumExt", "ReduceSum", "DeprecatedSum"), 0.0),
    **dict.fromkeys(("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Mm", "Dense"), 0.0),
    **dict.fromkeys(("ReduceAny", "Any", "AnyExt"), False),
    **dict.fromkeys(("ReduceAll", "All"), True),
}
"""What reductions over nothing give."""

_LIKE_FIRST = frozenset({"Tril", "TrilExt"})
"""Operators that give back the shape of their first tensor, and fail on nothing, which would end a recording."""

_LOG_SOFTMAX = frozenset({"LogSoftmax", "LogSoftmaxExt"})


def call(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``function(*args, **kwargs)`` on local tensors, ``name`` being the primitive."""
    if not on_cpu():
        return function(*args, **kwargs)
    if name in _LOG_SOFTMAX and args[0].ndim > 0:
        return _log_softmax(name, args, kwargs)
    tensors = [x for x in _tensors((*args, *kwargs.values())) if x.size == 0]
    if not tensors:
        return function(*args, **kwargs)
    if name == "Concat":
        return concat(args[0], args[1] if len(args) > 1 else 0)
    every = list(_tensors((*args, *kwargs.values())))
    with _no_grad():
        shapes = args[0].copy() if name in _LIKE_FIRST else _result_shapes(function, args, kwargs)
    if name in _OF_NOTHING:
        like = shapes[0] if isinstance(shapes, (tuple, list)) else shapes
        value = ops.full(like.shape, _OF_NOTHING[name], dtype=like.dtype)
        bias = args[2] if name == "Dense" and len(args) > 2 else None
        tied = _tie(value, every)
        return tied if bias is None else ops.add(tied, bias)
    if any(like.size for like in _tensors((shapes,))):
        return function(*args, **kwargs)
    if isinstance(shapes, (tuple, list)):
        return type(shapes)(_tie(like, every) for like in shapes)
    return _tie(shapes, every)


def concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate; tensors without elements count for the graph alone."""
    filled = [x for x in tensors if x.size]
    empty = [x for x in tensors if not x.size]
    if not filled:
        with _no_grad():
            nothing = ops.concat(list(tensors), dim)
        return _tie(nothing, empty)
    result: Tensor = ops.concat(filled, dim) if len(filled) > 1 else filled[0]
    return _tie(result, empty)


def _result_shapes(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Tensors of the shapes and dtypes that the operator gives.

    Not all kernels take tensors without elements. Then it runs with sizes of 1, and of 2, in the place of 0: what
    follows in the result is 0 as well.
    """
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        pass
    once, twice = (
        function(*[_filled(a, size) for a in args], **{key: _filled(value, size) for key, value in kwargs.items()})
        for size in (1, 2)
    )
    if isinstance(once, (tuple, list)):
        return type(once)(_common(a, b) for a, b in zip(once, twice, strict=True))
    return _common(once, twice)


def _filled(x: Any, size: int) -> Any:
    if isinstance(x, Tensor):
        return ops.ones(tuple(s or size for s in x.shape), x.dtype) if x.size == 0 else x
    if type(x) in (tuple, list):
        return type(x)([_filled(i, size) for i in x])
    return x


def _common(once: Any, twice: Any) -> Any:
    if not isinstance(once, Tensor):
        return once
    shape = tuple(a if a == b else 0 for a, b in zip(once.shape, twice.shape, strict=True))
    return ops.zeros(shape, once.dtype)


def _tie(result: Any, inputs: Sequence[Tensor]) -> Any:
    """``result``, on the graph of the inputs, whose gradients from here are zeros."""
    if not isinstance(result, Tensor) or not str(result.dtype).startswith(("Float", "BFloat")):
        return result
    linked = [as_input(x) for x in inputs if requires_grad(x)]
    return _Tie.apply(result, *linked) if linked else result


class _Tie(_Function):
    """The first tensor; the others get a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(other.shape, other.dtype) for other in others]
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(ops.zeros(shape, dtype) for shape, dtype in ctx.like)


def _log_softmax(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    from hyper_parallel.platform import get_platform
    from hyper_parallel.platform.loss_kernels import ClassShard
    from hyper_parallel.platform.mindspore.loss_arguments import bind_log_softmax

    bound = bind_log_softmax(name, args, kwargs)
    x, dim = bound.input, bound.dim % bound.input.ndim
    shard = ClassShard(0, x.shape[dim], x.shape[dim])
    return get_platform().loss_kernels.log_softmax(x, dim, shard, dtype=bound.dtype, validate=False)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
