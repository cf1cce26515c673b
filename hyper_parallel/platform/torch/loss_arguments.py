"""Reading the arguments of PyTorch's cross-entropy family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.nn import _reduction

from hyper_parallel.platform.platform import LossArguments

__all__ = ["bind"]


def _signature(**defaults: Any) -> Signature:
    return Signature(
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default) for name, default in defaults.items()]
    )


_REQUIRED = Parameter.empty
_NLL = _signature(
    input=_REQUIRED, target=_REQUIRED, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"
)
_CROSS_ENTROPY = _signature(
    input=_REQUIRED, target=_REQUIRED, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
)  # fmt: skip
_ATEN_NLL = _signature(self=_REQUIRED, target=_REQUIRED, weight=None, reduction=1, ignore_index=-100)
_ATEN_REDUCTIONS = ("none", "mean", "sum")
_ATEN = (BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""``torch._C._nn.nll_loss`` and ``torch.ops.aten.nll_loss``: other arguments than the function in Python, one name."""

_FUNCTIONAL_LOG_SOFTMAX = _signature(input=_REQUIRED, dim=None, _stacklevel=3, dtype=None)
_LOG_SOFTMAX = _signature(input=_REQUIRED, dim=_REQUIRED, dtype=None)


def bind(kind: str, op_call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossArguments:
    """The arguments, with the deprecated ``size_average`` and ``reduce`` turned into ``reduction`` as PyTorch does.

    Raises:
        TypeError: arguments that the function does not take.
    """
    if kind == "log_softmax":
        functional = op_call is torch.nn.functional.log_softmax
        signature = _FUNCTIONAL_LOG_SOFTMAX if functional else _LOG_SOFTMAX
        values = signature.bind(*args, **kwargs)
        values.apply_defaults()
        a = values.arguments
        dim = a["dim"]
        if dim is None:  # PyTorch's implicit choice
            dim = 0 if a["input"].ndim in (0, 1, 3) else 1
        dtype = a["dtype"]
        if isinstance(dtype, bool):  # half_to_float of aten._log_softmax
            dtype = torch.float32 if dtype else None
        return LossArguments(kind, a["input"], dim=dim, dtype=dtype)
    if kind == "nll_loss" and isinstance(op_call, _ATEN):
        values = _ATEN_NLL.bind(*args, **kwargs)
        values.apply_defaults()
        a = values.arguments
        return LossArguments(
            kind,
            a["self"],
            target=a["target"],
            weight=a["weight"],
            ignore_index=a["ignore_index"],
            reduction=_ATEN_REDUCTIONS[a["reduction"]],
        )
    values = (_CROSS_ENTROPY if kind == "cross_entropy" else _NLL).bind(*args, **kwargs)
    values.apply_defaults()
    a = values.arguments
    reduction = a["reduction"]
    if a["size_average"] is not None or a["reduce"] is not None:
        reduction = _reduction.legacy_get_string(a["size_average"], a["reduce"])
    return LossArguments(
        kind,
        a["input"],
        target=a["target"],
        weight=a["weight"],
        ignore_index=a["ignore_index"],
        reduction=reduction,
        label_smoothing=a.get("label_smoothing", 0.0),
    )
