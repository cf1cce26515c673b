"""The tensor class under DTensor: MindSpore's ``__fallback__`` leads operators to the dispatcher.

What MindSpore answers without asking ``__fallback__`` would be the local tensor's answer taken for the global one. So
every such method of Tensor is defined here anew: led to the dispatcher, answered with global numbers, or refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from mindspore import Parameter, Tensor, ops

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.mindspore._bytecode_capture import refuse_arguments
from hyper_parallel.platform.mindspore._graph_capture import asked, refuse_in_trace
from hyper_parallel.platform.mindspore._host import on_cpu
from hyper_parallel.platform.mindspore.op_names import NamedCall, unpack
from hyper_parallel.platform.mindspore.tensor_hooks import install_routes

__all__ = ["TensorBase", "as_dtensor", "as_local", "call_local", "local_mode"]


def local_mode() -> nullcontext[None]:
    """Inside it DTensors behave as local tensors do; needs nothing here, as :func:`call_local` passes plain ones."""
    return nullcontext()


def _host_value(name: str) -> Callable[..., Any]:
    def method(self: TensorBase, *args: Any) -> Any:
        return type(self)._dispatch(NamedCall(name, getattr(Tensor, name)), (self, *args), {})

    return method


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def method(self: TensorBase, *_: Any, **__: Any) -> Any:
        raise UnsupportedOperatorError(f"Tensor.{name} is not supported on a DTensor; {instead}")

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    # a plain tensor on the left fails with a DTensor on the right; Python asks a subclass first
    def method(self: TensorBase, other: Any) -> Any:
        return function(other, self)

    return method


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    # `x += y` binds x to a new DTensor: in-place arithmetic is silently not in place on MindSpore's CPU backend
    def method(self: TensorBase, other: Any) -> Any:
        return function(self, other)

    return method


_TO_LOCAL = "use to_local() for this rank's part, or full_tensor() (collective) for the whole"
_OUT_OF_PLACE = (
    "a DTensor is not written to (on CPU, MindSpore's in-place arithmetic silently is not in place); compute a new "
    "one, or write to to_local()"
)


class TensorBase(Tensor):
    """A local shard whose operators go to ``cls._dispatch``."""

    _layout: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        install_routes(TensorBase)
        refuse_arguments(TensorBase)

    def __new__(cls, *_: Any, **__: Any) -> TensorBase:
        raise TypeError(
            f"{cls.__name__} is made with DTensor.from_local or distribute_tensor. For a parameter, give "
            "mindspore.Parameter the local tensor"
        )

    @classmethod
    def _dispatch(cls, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError(f"{cls.__name__} must define _dispatch")

    def __fallback__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.name.startswith("Inplace"):
            raise UnsupportedOperatorError(f"{func.name}: {_OUT_OF_PLACE}")
        return type(self)._dispatch(*unpack(func, args, kwargs))

    # -- global numbers ----------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._layout.shape)

    @property
    def ndim(self) -> int:
        return len(self._layout.shape)

    @property
    def size(self) -> int:
        count = 1
        for s in self._layout.shape:
            count *= s
        return count

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def dim(self) -> int:
        return self.ndim

    ndimension = dim

    def numel(self) -> int:
        return self.size

    nelement = numel

    # -- values on the host: the global ones -------------------------------------------------------------

    asnumpy = _host_value("asnumpy")
    numpy = _host_value("numpy")
    tolist = _host_value("tolist")
    item = _host_value("item")
    __array__ = _host_value("__array__")
    __bool__ = _host_value("__bool__")
    __float__ = _host_value("__float__")
    __int__ = _host_value("__int__")
    __index__ = _host_value("__index__")

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec else str(self), spec)

    # -- indexing ----------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return type(self)._dispatch(_GETITEM, (self, index), {})

    __setitem__ = _refused("__setitem__", "use ops.where, or write to to_local()")
    __contains__ = _refused("__contains__", _TO_LOCAL)

    # -- arithmetic with a plain tensor on the left, and in place ----------------------------------------

    __radd__ = _reflected(ops.add)
    __rsub__ = _reflected(ops.sub)
    __rmul__ = _reflected(ops.mul)
    __rtruediv__ = _reflected(ops.div)
    __rpow__ = _reflected(ops.pow)
    __rmod__ = _reflected(ops.floor_mod)
    __rand__ = _reflected(ops.bitwise_and)
    __ror__ = _reflected(ops.bitwise_or)
    __rxor__ = _reflected(ops.bitwise_xor)

    __iadd__ = _in_place(ops.add)
    __isub__ = _in_place(ops.sub)
    __imul__ = _in_place(ops.mul)
    __itruediv__ = _in_place(ops.div)
    __ifloordiv__ = _in_place(ops.floor_div)
    __imod__ = _in_place(ops.floor_mod)

    # -- the same tensor ---------------------------------------------------------------------------------

    def __pos__(self) -> TensorBase:
        return self

    def positive(self) -> TensorBase:
        return self

    def value(self) -> TensorBase:
        return self

    def contiguous(self) -> Any:
        return as_dtensor(type(self), as_local(self).contiguous(), self._layout)

    @property
    def data(self) -> Any:
        return as_dtensor(type(self), ops.stop_gradient(as_local(self)), self._layout)

    @data.setter
    def data(self, _: Any) -> None:
        raise UnsupportedOperatorError(f"Tensor.data cannot be set on a DTensor; {_OUT_OF_PLACE}")

    def type_as(self, other: Any) -> Any:
        return self.to(other.dtype)

    # -- graph mode --------------------------------------------------------------------------------------

    @property
    def _fields(self) -> Any:
        asked(self)  # what it comes across raises in the end
        raise AttributeError("_fields")

    # Capturing a graph from bytecode asks for these. The one makes it take a DTensor for a tuple of parameters, which
    # it is not: the graph is split there, and Python dispatches. The other is asked of every input of a graph that was
    # made before from a plain tensor of the same local shape; as init_data then fails, the function runs as Python.
    @property
    def __parameter_tuple__(self) -> bool:
        if asked(self):
            raise AttributeError("__parameter_tuple__")
        return True

    @property
    def has_init(self) -> bool:
        return True

    def init_data(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedOperatorError(f"a DTensor is no input of a graph, nor a parameter's value; {_TO_LOCAL}")

    @property
    def __self__(self) -> Any:
        # the compiler asks for this where it meets a captured tensor, and would go on with the local values
        if sys._getframe(1).f_code.co_name == "resolve_symbol":
            raise UnsupportedOperatorError(
                "a DTensor is used in graph mode, where operators on it cannot be dispatched; use PyNative mode, or "
                "pass to_local()"
            )
        raise AttributeError("__self__")


for _name in ("assign_value", "assign_value_cpp", "_update_data", "set_", "set_dtype", "fill", "itemset", "resize",
              "_setitem", "_setitem_origin", "set_data", "data_sync", "cauchy"):  # fmt: skip
    setattr(TensorBase, _name, _refused(_name, _OUT_OF_PLACE))
for _name in ("get_bytes", "to_dlpack", "_getitem", "_getitem_origin", "_item", "_tolist", "_numpy_non_blocking",
              "isreal", "stride", "storage", "untyped_storage", "storage_offset", "getitem_index_info",
              "setitem_index_info"):  # fmt: skip
    setattr(TensorBase, _name, _refused(_name, _TO_LOCAL))
TensorBase.strides = property(_refused("strides", _TO_LOCAL))  # type: ignore[assignment]

_GETITEM = NamedCall("getitem", lambda x, index: x[index])


def as_dtensor(cls: type, local: Tensor, layout: Any, *, fresh: bool = False) -> Any:
    """Dress ``local`` with ``layout``, on the same autograd graph and storage."""
    refuse_in_trace("a DTensor is made")
    if on_cpu():  # else the error of an operator that the device lacks surfaces below, and crashes the interpreter
        local.wait_pipeline()
    if isinstance(local, Parameter):  # an alias of it would get a gradient that the parameter does not see
        local = local.view(local.shape)
    if fresh and type(local) is Tensor:
        local.__class__ = cls  # cheaper than an alias
        out = local
    else:
        out = Tensor._make_subclass(cls, local)
    out._layout = layout
    return out


def as_local(x: Tensor) -> Tensor:
    """The plain local tensor, on the same autograd graph."""
    if not isinstance(x, TensorBase):
        return x
    return Tensor._make_subclass(Tensor, x)


def call_local(op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the local tensors."""
    return op_call(*[_localize(a) for a in args], **{key: _localize(value) for key, value in kwargs.items()})


def _localize(x: Any) -> Any:
    if isinstance(x, TensorBase):
        return Tensor._make_subclass(Tensor, x)
    if type(x) in (tuple, list):
        return type(x)([_localize(i) for i in x])
    return x
