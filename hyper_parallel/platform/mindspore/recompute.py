"""Values that backward computes again instead of keeping them: ``mindspore.recompute`` with a chosen set of parameters.

Of MindSpore's two ways it is the one that runs the function without recording it, and records it in backward: nothing
but its inputs is kept, also of the library's own operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore.common.api import _pynative_executor

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform.mindspore.dtensor import TensorBase, as_dtensor, as_local
from hyper_parallel.platform.mindspore.module_rules import add_rule
from hyper_parallel.platform.platform import Group

__all__ = ["recompute_blocks", "recomputed"]


def recompute_blocks(model: nn.Cell) -> None:
    """Let the repeated layers, the children of the outermost cell lists, keep their input alone.

    Raises:
        ValueError: the model has none.
    """
    lists = {name: cell for name, cell in model.cells_and_names() if isinstance(cell, (nn.CellList, nn.CellDict))}
    outermost = [cell for name, cell in lists.items() if not any(name.startswith(f"{o}.") for o in lists if o != name)]
    blocks = [block for found in outermost for block in found.cells()]
    if not blocks:
        raise ValueError(f"{type(model).__name__} keeps its layers in no nn.CellList, so there is nothing to recompute")
    for block in blocks:
        add_rule(block, _Recomputed())


def recomputed(function: Callable[..., Any], inputs: Sequence[Any], parameters: Sequence[Parameter]) -> Any:
    """``function(*inputs)``, a tensor or a DTensor, whose inner values are not kept.

    Args:
        function: of the inputs and the parameters alone.
        inputs: tensors and DTensors, which get gradients, and other values.
        parameters: what else gets gradients.
    """
    if not (_pynative_executor.grad_flag() and _pynative_executor.enable_grad()):
        return function(*inputs)
    part = _Part(function, inputs, parameters)
    result = mindspore.recompute(part, *(as_local(x) for x in inputs))
    return result if part.dress is None else part.dress(result)


class _Part(nn.Cell):
    """The function between plain tensors, since those are what MindSpore passes to it again in backward."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any], parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.__dict__["function"], self.__dict__["own"] = function, list(parameters)
        self.__dict__["dressing"] = [_dressing(x) for x in inputs]
        self.__dict__["dress"] = None

    def construct(self, *inputs: Any) -> Tensor:
        """As ``function``; what its result was dressed in stays in ``dress``."""
        result = self.function(*(x if dress is None else dress(x) for dress, x in zip(self.dressing, inputs)))
        self.__dict__["dress"] = _dressing(result)
        return as_local(result)

    def trainable_params(self, recurse: bool = True) -> list[Parameter]:
        """Those that get gradients."""
        return list(self.own)

    def check_names_and_refresh_name(self) -> None:
        """Nothing: the parameters keep the names that they have in the model."""


def _dressing(x: Any) -> Callable[[Tensor], Any] | None:
    """What makes a plain tensor such a DTensor; None for other values."""
    if not isinstance(x, TensorBase):
        return None
    kind, layout = type(x), x._layout
    return lambda local: as_dtensor(kind, local, layout)


@dataclass(eq=False)
class _Recomputed:
    """Around a layer's construct."""

    cuts: Mapping[str, ShardSpec] = field(default_factory=dict)
    group: Group = field(default_factory=lambda: Group((0,), None, 0))

    def __call__(self, module: nn.Cell, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return recomputed(lambda *inputs: forward(*inputs, **kwargs), args, module.trainable_params())
