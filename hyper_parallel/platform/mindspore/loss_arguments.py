"""Reading the arguments of MindSpore's cross-entropy family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

from mindspore._c_expression import typing

from hyper_parallel.platform.platform import LossArguments

__all__ = ["bind", "bind_log_softmax"]


def _signature(**defaults: Any) -> Signature:
    return Signature(
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default) for name, default in defaults.items()]
    )


_REQUIRED = Parameter.empty
_LOSS = _signature(
    input=_REQUIRED, target=_REQUIRED, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0
)
_LOG_SOFTMAX = _signature(input=_REQUIRED, dim=-1)
_LOG_SOFTMAX_EXT = _signature(input=_REQUIRED, dim=None, dtype=None)

_SAME = {"inputs": "input", "logits": "input", "axis": "dim"}


def bind(kind: str, op_call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossArguments:
    """The arguments; those of ``ops`` and of ``mint`` differ in spelling only.

    Raises:
        TypeError: arguments that the function does not take.
    """
    if kind == "log_softmax":
        return bind_log_softmax(getattr(op_call, "name", ""), args, kwargs)
    values = _LOSS.bind(*args, **_renamed(kwargs))
    values.apply_defaults()
    return LossArguments(kind, **values.arguments)


def bind_log_softmax(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossArguments:
    """The same for the primitive of that name."""
    signature = _LOG_SOFTMAX if name == "LogSoftmax" else _LOG_SOFTMAX_EXT
    values = signature.bind(*args, **_renamed(kwargs))
    values.apply_defaults()
    a = values.arguments
    dim = a["dim"]
    if dim is None:  # the implicit choice, PyTorch's too
        dim = 0 if a["input"].ndim in (0, 1, 3) else 1
    return LossArguments("log_softmax", a["input"], dim=dim, dtype=_as_dtype(a.get("dtype")))


def _renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {_SAME.get(name, name): value for name, value in kwargs.items()}


def _as_dtype(dtype: Any) -> Any:
    """Primitives receive a dtype as its number."""
    return typing.type_id_to_type(dtype) if isinstance(dtype, int) else dtype
