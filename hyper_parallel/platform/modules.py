"""What a backend owes tensor parallelism about modules and parameters: the one part that knows
``nn.Module``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Group, Tensor

if TYPE_CHECKING:
    from hyper_parallel.core.shard_spec import ShardSpec

__all__ = [
    "ForwardRule",
    "LayerFacts",
    "Module",
    "ModuleBackend",
    "Parameter",
    "get_module_backend",
    "without_values",
]

Module = Any
"""A module of the backend."""

Parameter = Any
"""A parameter of the backend: a plain local tensor."""


@dataclass(frozen=True)
class LayerFacts:
    """What kind of layer a module is.

    Attributes:
        kind: ``"linear"`` (``y = x W^T + b``), ``"embedding"`` (rows of a table), or ``"other"``.
        type_name: the module's class, for messages.
        in_features: input width; the number of rows of an embedding.
        out_features: output width; the row length of an embedding.
        transposed: whether a linear layer stores its weight as ``[in, out]`` and not as ``[out, in]``.
        has_bias: whether it adds a bias.
        padding_idx: the row of an embedding that gets no gradient.
        scale: the attribute that an embedding multiplies its rows with, if it does.
        refusal: why this layer cannot be shared between ranks, if so.
        weight: the name of its weight.
    """

    kind: str
    type_name: str
    in_features: int = 0
    out_features: int = 0
    transposed: bool = False
    has_bias: bool = False
    padding_idx: int | None = None
    scale: str | None = None
    refusal: str | None = None
    weight: str = "weight"


class ForwardRule(Protocol):
    """What runs around, or instead of, a module's forward. It holds no module, so that modules can be
    copied.
    """

    @property
    def cuts(self) -> Mapping[str, ShardSpec]:
        """How the module's own parameters are cut."""

    @property
    def group(self) -> Group:
        """The ranks that they are cut over."""

    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's output; ``forward`` is what ran before the rule was added."""


class ModuleBackend(ABC):
    """Modules and parameters of one framework."""

    module_base: type
    """Base class of the library's own layers: a module that does what its rules do."""

    # -- looking at modules ----------------------------------------------------------------------------------

    @abstractmethod
    def is_module(self, x: Any) -> bool:
        """Whether ``x`` is a module."""

    @abstractmethod
    def named_modules(self, module: Module) -> list[tuple[str, Module]]:
        """All modules with their dotted names; the first is ``("", module)``. A shared module comes once."""

    @abstractmethod
    def own_parameters(self, module: Module) -> dict[str, Parameter]:
        """The module's own parameters by name, not those of its children."""

    @abstractmethod
    def describe(self, module: Module) -> LayerFacts:
        """What kind of layer it is."""

    @abstractmethod
    def has_memory(self, parameter: Parameter) -> bool:
        """False for a parameter that has a shape and no values yet."""

    @abstractmethod
    def element_size(self, parameter: Parameter) -> int:
        """Bytes of one element."""

    # -- changing them ---------------------------------------------------------------------------------------

    @abstractmethod
    def cut_parameter(self, parameter: Parameter, spec: ShardSpec, rank: int) -> None:
        """Keep only what ``rank`` holds. In place: the parameter stays the same object, so ties hold."""

    @abstractmethod
    def new_parameter(self, shape: Sequence[int], dtype: Any, device: Any) -> Parameter:
        """An uninitialised parameter."""

    @abstractmethod
    def fill_parameter(self, parameter: Parameter, values: Any) -> None:
        """Fill with the values of a NumPy array, cast to the parameter's dtype."""

    @abstractmethod
    def add_rule(self, module: Module, rule: ForwardRule, name: str = "") -> None:
        """Have ``rule`` run around the module's forward, outside the rules added before; ``name``: for messages.

        The module keeps its type, name and parameters. The marks on its parameters (``rule.cuts``) survive
        copying the module and moving it to another device or dtype.
        """

    @abstractmethod
    def rules(self, module: Module) -> tuple[ForwardRule, ...]:
        """The rules added so far."""

    @abstractmethod
    def call_with(
        self,
        module: Module,
        forward: Callable[..., Any],
        tensors: Mapping[str, Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run ``forward`` with other tensors in the place of some of the module's own parameters."""

    # -- computing -------------------------------------------------------------------------------------------

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """``x W^T + b``; with ``transposed`` the weight is ``[in, out]``."""

    @abstractmethod
    def shared_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
    ) -> Tensor:
        """The same, with the gradient of ``x`` summed over the group while that of the weight is computed."""

    @abstractmethod
    def change_count(self, x: Tensor) -> int | None:
        """A number that is another one when ``x`` was changed in place; None where none can be had cheaply."""

    @abstractmethod
    def lookup(self, ids: Tensor, table: Tensor, start: int, padding_idx: int | None) -> Tensor:
        """Rows of a table that holds ids from ``start`` on; zeros for ids that it does not hold.

        Args:
            ids: integers of any shape.
            table: ``[rows, width]``; may be empty.
            start: the id of its first row.
            padding_idx: the row of ``table`` that gets no gradient.
        """

    @abstractmethod
    def scaled(self, x: Tensor, scale: Any) -> Tensor:
        """``x`` times a number, or a scalar tensor rounded to its dtype."""

    @abstractmethod
    def id_range(self, ids: Tensor) -> tuple[int, int] | None:
        """Smallest and largest id; None when there are none, or when looking would make an accelerator
        wait.
        """

    # -- gradients -------------------------------------------------------------------------------------------

    @abstractmethod
    def gradient(self, parameter: Parameter) -> Tensor | None:
        """The accumulated gradient."""

    @abstractmethod
    def parameter_name(self, parameter: Parameter) -> str | None:
        """What the framework calls it when it names gradients; None where it does not."""

    @abstractmethod
    def power_sum(self, tensors: Sequence[Tensor], order: float, like: Tensor) -> Tensor:
        """``sum |x|^order`` of all elements, at least in fp32; the largest ``|x|`` when ``order`` is
        infinite.

        A scalar on ``like``'s device, 0 when there are no elements.
        """

    @abstractmethod
    def root(self, x: Tensor, order: float) -> Tensor:
        """``x ** (1 / order)`` of a scalar, in its dtype."""

    @abstractmethod
    def clip_factor(self, norm: Tensor, max_norm: float) -> Tensor:
        """``min(max_norm / (norm + 1e-6), 1)`` of a scalar, in its dtype; NaN stays."""

    @abstractmethod
    def scale_gradients(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply in place."""


def without_values(parameter: str, shape: tuple[int, ...]) -> str:
    """What to tell who computes with a parameter that has a shape and no values yet."""
    return (
        f"{parameter} of local shape {shape} has no values yet; before the model is used, call "
        "materialize(model), or load_hf_checkpoint(model, path)"
    )


@lru_cache(maxsize=1)
def get_module_backend() -> ModuleBackend:
    """The one of this process's platform."""
    module = importlib.import_module(f"hyper_parallel.platform.{get_platform().name}.modules")
    backend: ModuleBackend = module.create_module_backend()
    return backend
