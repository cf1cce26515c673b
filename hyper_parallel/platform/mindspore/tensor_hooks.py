"""Where MindSpore would not ask a DTensor: the functions that are routed to the dispatcher, and graph mode.

PyTorch needs none of this: it asks a tensor subclass everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspore import Tensor, nn
from mindspore.graph import api as graph_api
from mindspore.graph import jit_trace
from mindspore.ops import primitive as primitive_module
from mindspore.ops.function import nn_func

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore._graph_capture import NOT_IN_GRAPHS, compiled
from hyper_parallel.platform.mindspore._host import on_cpu
from hyper_parallel.platform.mindspore._replaced_body import Handler, route
from hyper_parallel.platform.mindspore.module_rules import RuledModule
from hyper_parallel.platform.mindspore.op_names import NamedCall, PackedPrimitive
from hyper_parallel.platform.values import StandIn

__all__ = ["install_routes"]

_OURS = "_asks_for_dtensors"


def install_routes(base: type) -> None:
    """Route, once, what would take the local values of a ``base`` for the global ones; others notice nothing.

    - ``ops.cross_entropy``, ``mint.nn.functional.cross_entropy``, the two ``nll_loss`` and all cells over them are one
      operator each for the dispatcher, as they are in PyTorch. (By itself MindSpore takes them apart first.) Outside
      ``loss_parallel()`` class-sharded logits are then an error, which names their layout.
    - Older primitives with a list of tensors (``ops.stack``, ``ops.addn``), and a plain tensor indexed with a DTensor,
      reach the dispatcher.
    - Graph mode, ``Tensor(dtensor)`` and writing a DTensor into a plain tensor are refused.
    """
    for name, function, newer in (
        ("cross_entropy", nn_func.cross_entropy, nn_func.cross_entropy_ext),
        ("nll_loss", nn_func.nll_loss, nn_func.nll_loss_ext),
    ):
        route(function, _dispatch_as(name, base))
        # the newer ones have no CPU kernels; on replicated DTensors the older ones compute the same there
        route(newer, _dispatch_as(name, base, on_host=function))
    route(nn.CrossEntropyLoss.construct, _without_tensor_checks)
    route(primitive_module._run_op, _dispatch_lists(base))
    refuse = _refuse(base, NOT_IN_GRAPHS, compiled)
    route(graph_api._JitExecutor.compile, refuse)
    route(nn.Cell.compile, _refuse_rules(refuse))
    route(jit_trace._jit_trace_begin, _refuse(base, NOT_IN_GRAPHS))
    for method, made in (("__getitem__", _indexing), ("__setitem__", _item_assignment)):
        if not hasattr(getattr(Tensor, method), _OURS):  # others may have put methods of their own there
            setattr(Tensor, method, made(base))
    tensor_module = importlib.import_module("mindspore.common.tensor")  # the attribute of that name is a function
    route(
        tensor_module._init,
        _refuse(base, "it would take the local values alone; use to_local(), or full_tensor() (collective)"),
    )


def _dispatch_as(name: str, base: type, on_host: Callable[..., Any] | None = None) -> Handler:
    """A call with a DTensor, or with a stand-in of a tensor, among its arguments goes to these as operator ``name``.

    ``on_host``: what computes it on CPU on local tensors, when not the function itself.
    """

    def handler(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, (base, StandIn)):
                function = on_host if on_host is not None and on_cpu() else original
                return type(x)._dispatch(NamedCall(name, function), args, kwargs)  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    return handler


def _without_tensor_checks(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``nn.CrossEntropyLoss`` demands tensors before it calls ``ops.cross_entropy``; stand-ins go there at once."""
    if not any(isinstance(x, StandIn) for x in (*args, *kwargs.values())):
        return original(*args, **kwargs)
    cell, *others = args
    names = dict(zip(("logits", "labels"), others, strict=False), **kwargs)
    return nn_func.cross_entropy(
        names["logits"], names["labels"], cell.weight, cell.ignore_index, cell.reduction, cell.label_smoothing
    )


def _dispatch_lists(base: type) -> Handler:
    """For ``_run_op(primitive, name, inputs)``: MindSpore itself looks for DTensors among the inputs, not in lists."""

    def handler(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inputs = args[2] if len(args) == 3 else ()
        for value in inputs:
            if type(value) in (tuple, list):
                for x in value:
                    if isinstance(x, base):
                        packed = PackedPrimitive(args[0], original)
                        return type(x)._dispatch(packed, (*inputs, *packed.attributes()), {})  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    return handler


def _call(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return original(*args, **kwargs)


def _refuse(base: type, why: str, go_on: Handler = _call) -> Handler:
    def handler(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for x in _leaves((*args, *kwargs.values())):
            if isinstance(x, base):
                raise UnsupportedOperatorError(
                    f"{original.__qualname__.lstrip('_')} got a DTensor of shape {x.shape}: {why}"  # type: ignore[attr-defined]
                )
        return go_on(original, args, kwargs)

    return handler


def _refuse_rules(refuse: Handler) -> Handler:
    """For ``Cell.compile``: a cell whose layers are shared between ranks holds what the compiler cannot read."""

    def handler(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for name, cell in args[0].cells_and_names():
            if isinstance(cell, RuledModule):
                raise UnsupportedOperatorError(
                    f"{type(args[0]).__name__} was given to parallelize_module (layer {name or 'itself'!r}), which "
                    "graph mode cannot compile; use PyNative mode"
                )
        try:
            return refuse(original, args, kwargs)
        except UnsupportedOperatorError:
            args[0].compile_cache.clear()  # what is in there would not be asked again
            raise

    return handler


def _indexing(base: type) -> Callable[..., Any]:
    original = Tensor.__getitem__

    def __getitem__(self: Tensor, index: Any) -> Any:  # noqa: N807
        if type(index) in (tuple, list):
            for x in _leaves(index):
                if isinstance(x, base):
                    return type(x)._dispatch(NamedCall("getitem", original), (self, index), {})  # type: ignore[attr-defined]
        return original(self, index)

    setattr(__getitem__, _OURS, True)
    return __getitem__


def _item_assignment(base: type) -> Callable[..., Any]:
    original = Tensor.__setitem__

    def __setitem__(self: Tensor, index: Any, value: Any) -> Any:  # noqa: N807
        for x in _leaves((index, value)):
            if isinstance(x, base):
                raise UnsupportedOperatorError(
                    f"a DTensor of shape {x.shape} cannot be written into a plain tensor, nor say where to write; use "  # type: ignore[attr-defined]
                    "to_local(), or full_tensor() (collective)"
                )
        return original(self, index, value)

    setattr(__setitem__, _OURS, True)
    return __setitem__


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(tuple(value.values()))
        else:
            yield value
