"""What an operator family answers: given the layouts of the inputs, how to run the operator on local tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.errors import UnsupportedOperatorError

__all__ = ["DistributedOp", "OpCall", "OpPlan", "TensorArg"]

Path = str | tuple[str, int]
"""An argument by name, or one element of a list argument."""


@dataclass(frozen=True)
class TensorArg:
    """A tensor among the arguments.

    Attributes:
        layout: of a DTensor its layout; of a plain tensor its shape, replicated.
        plain: whether it is a plain tensor beside DTensors.
        dtype: NumPy's name of the dtype.
    """

    layout: Layout
    plain: bool
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.layout.shape


@dataclass(frozen=True)
class OpCall:
    """One operator call with its arguments bound to the names of the operator's signature.

    Tensors appear as :class:`TensorArg`, everything else as it was passed. ``options`` come from the YAML entry.
    """

    name: str
    args: Mapping[str, Any]
    mesh: DeviceMesh
    options: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[tuple[Path, TensorArg]]:
        """Every tensor argument with its path."""
        found: list[tuple[Path, TensorArg]] = []
        for name, value in self.args.items():
            if isinstance(value, TensorArg):
                found.append((name, value))
            elif isinstance(value, (tuple, list)):
                found += [((name, i), v) for i, v in enumerate(value) if isinstance(v, TensorArg)]
        return found

    def describe(self) -> str:
        """``add(input: shape (4, 8), S(1)@tp on mesh (tp=2); other: plain (8,))``."""
        parts = []
        for path, t in self.tensors():
            label = path if isinstance(path, str) else f"{path[0]}[{path[1]}]"
            parts.append(f"{label}: plain tensor of shape {t.shape}" if t.plain else f"{label}: {t.layout.describe()}")
        return f"{self.name}({'; '.join(parts)})"


@dataclass(frozen=True)
class OpPlan:
    """How to run the call locally.

    Attributes:
        outputs: the layout of the result, or a sequence for several; None: return the local result as it is.
        inputs: layouts that inputs are brought to first (only reducing a Partial or slicing a Replicate).
        replace: local values for arguments that are not tensors, such as the shape of a view; by name, or by name and
            position for one element of a tuple.
        run: what to call instead of the operator, with the same (local) arguments; its tensors are local ones.
    """

    outputs: Layout | Sequence[Layout] | None
    inputs: Mapping[Path, Layout] = field(default_factory=dict)
    replace: Mapping[Path, Any] = field(default_factory=dict)
    run: Callable[..., Any] | None = None


class DistributedOp(ABC):
    """A family of operators that share one layout rule. Instances hold no state.

    To add an operator, subclass this, register it with :func:`register_distributed_op`, and name the operator in a
    YAML table (or rely on the family's ``signature``).
    """

    signature: str = "input, *args, **kwargs"
    """Default signature; a YAML entry can give the operator its own."""

    @abstractmethod
    def plan(self, call: OpCall) -> OpPlan:
        """Infer the layout of the result.

        Raises:
            UnsupportedOperatorError: through :meth:`refuse`, for layouts without a rule.
        """

    def refuse(self, call: OpCall, why: str) -> UnsupportedOperatorError:
        """The error for a call without a rule: names the operator, the layouts and the way out."""
        return UnsupportedOperatorError(
            f"{call.describe()}: {why}. Redistribute an input first, or register a rule for {call.name!r} with "
            "register_distributed_op and a YAML table (HYPER_PARALLEL_OPS_YAML_DIR, HYPER_PARALLEL_OPS_PYTHON_PATH)"
        )
