"""What a backend owes the rest of the library. Nothing above this folder imports a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from hyper_parallel.platform.values import Group, LossArguments, NativeDTensor, NativeMesh, Tensor

if TYPE_CHECKING:
    from hyper_parallel.platform.loss_kernels import LossKernels

__all__ = ["Function", "Group", "LossArguments", "NativeDTensor", "NativeMesh", "Platform", "Tensor"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Platform(ABC):
    """One backend. All tensors here are plain local tensors; collectives never modify their inputs."""

    name: str
    """``"torch"`` or ``"mindspore"``."""

    version: str
    """The framework's version."""

    # -- processes ---------------------------------------------------------------------------------------------

    @abstractmethod
    def ensure_initialized(self, device_type: str) -> None:
        """Initialise the default process group from the environment (one process alone needs no environment)."""

    @abstractmethod
    def rank(self) -> int:
        """Global rank of this process; 0 when it is alone."""

    @abstractmethod
    def world_size(self) -> int:
        """Number of processes; 1 when this one is alone."""

    @abstractmethod
    def create_group(self, rank_lists: Sequence[tuple[int, ...]]) -> Group:
        """Collective: create the groups in ``rank_lists`` (disjoint) and return the one this process belongs to."""

    @abstractmethod
    def adopt_group(self, group: Any) -> Group:
        """Describe an existing group of the backend, without creating one."""

    @abstractmethod
    def describe_native_mesh(self, mesh: Any) -> NativeMesh:
        """Describe a mesh object of the backend, without creating groups."""

    # -- collectives on plain local tensors -----------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str, group: Group) -> Tensor:
        """Elementwise ``op`` (``"sum"``, ``"max"``, ``"min"``) over the group; same shape and dtype."""

    @abstractmethod
    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """``[P, *x.shape]``: every member's tensor of equal shape, in group order."""

    @abstractmethod
    def all_gather_uneven(self, x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
        """Concatenate along ``dim`` the members' tensors, whose sizes there are ``sizes``."""

    @abstractmethod
    def reduce_scatter_uneven(self, x: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
        """Sum over the group, then keep this member's piece of ``dim``, cut into ``sizes``."""

    @abstractmethod
    def all_to_all_uneven(
        self, chunks: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: Group
    ) -> list[Tensor]:
        """Send ``chunks[i]`` to member i and receive tensors of ``shapes[i]`` from it."""

    @abstractmethod
    def broadcast(self, x: Tensor, src: int, group: Group) -> Tensor:
        """The tensor of member ``src`` (an index in the group); all pass the same shape and dtype."""

    # -- autograd -------------------------------------------------------------------------------------------------

    @abstractmethod
    def linear_map(
        self,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        again: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """``forward(x)``, differentiable to any order: the gradient is ``adjoint`` of the output's, whose gradient is
        ``again``, whose gradient is ``adjoint``, ...

        ``again`` is ``forward`` by default. It differs where the terms of a sum come in: their gradients are whole
        (equal on all ranks), and so is what derivatives of these are taken of.
        """

    @abstractmethod
    def requires_grad(self, x: Tensor) -> bool:
        """Whether a gradient will be asked of ``x`` (True where the backend cannot tell)."""

    def in_backward(self) -> bool:
        """Whether a backward pass runs in this thread: forward code seen then is recomputed (checkpointing)."""
        return False

    # -- tensors --------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_tensor(self, x: Any) -> bool:
        """Whether ``x`` is a tensor of this backend (a DTensor too)."""

    @abstractmethod
    def shape(self, x: Tensor) -> tuple[int, ...]:
        """The local shape, also of a DTensor."""

    @abstractmethod
    def is_floating_point(self, x: Tensor) -> bool:
        """Whether the dtype is a floating one."""

    @abstractmethod
    def dtype_name(self, x: Tensor) -> str:
        """The dtype, as NumPy spells it: ``"float32"``, ``"bfloat16"``, ``"int64"``."""

    @abstractmethod
    def device_type(self, x: Tensor) -> str:
        """``"cpu"``, ``"cuda"``, ``"npu"``, ..."""

    @abstractmethod
    def narrow(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        """A contiguous copy or view of ``length`` elements of ``dim`` from ``start``."""

    @abstractmethod
    def cat(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate."""

    @abstractmethod
    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshape, differentiable."""

    @abstractmethod
    def where(self, condition: Tensor, x: Tensor, other: float) -> Tensor:
        """``x`` where the condition holds, else the number ``other``; broadcasts, differentiable in ``x``."""

    @abstractmethod
    def extremum(self, x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
        """Largest or smallest values along ``dim`` (kept, with size 1) and the first index of each, as int64.

        NaN counts as both. Of no elements: minus (plus) infinity, for integers the lowest (highest)
        value, and index 0. Not differentiable.
        """

    @abstractmethod
    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Zeros of ``like``'s dtype and device."""

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """The same values outside the graph."""

    @abstractmethod
    def clone(self, x: Tensor) -> Tensor:
        """A copy in memory of its own, contiguous, on the graph."""

    @abstractmethod
    def copy_leaf(self, x: Tensor) -> Tensor:
        """A copy outside the graph that requires a gradient where ``x`` does, if tensors of the framework say that."""

    @abstractmethod
    def to_numpy(self, x: Tensor) -> Any:
        """Values on the host as a NumPy array (bfloat16 as float32)."""

    @abstractmethod
    def from_numpy(self, array: Any, like: Tensor | None = None) -> Tensor:
        """A tensor of the array's dtype, on ``like``'s device."""

    # -- DTensor --------------------------------------------------------------------------------------------------

    tensor_base: type
    """Base class of DTensor: a tensor whose operator hook calls ``cls._dispatch(op_call, args, kwargs)``."""

    @abstractmethod
    def local_mode(self) -> AbstractContextManager[Any]:
        """A context in which DTensors behave as the plain local tensors that they are."""

    def local_dtype(self, x: Any) -> Any:
        """The dtype of a tensor or DTensor, asked in :meth:`local_mode`: the quickest way there is."""
        return x.dtype

    @abstractmethod
    def as_dtensor(self, cls: type, local: Tensor, layout: Any, *, fresh: bool = False) -> Any:
        """Dress a local tensor as ``cls`` with ``layout``; ``fresh``: nobody else holds it, so it may be changed."""

    @abstractmethod
    def as_local(self, x: Any) -> Tensor:
        """The local tensor of a DTensor, on the same autograd graph, without a copy."""

    @abstractmethod
    def call_local(self, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator in :meth:`local_mode`."""

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the framework's compiler from tracing into a function; the function itself where there is no need."""
        return function

    def uncaptured(self, function: Function) -> Function:
        """Keep bytecode capture, which splits its graphs at what it cannot take, out of a function that a compiler
        proper may trace; the function itself where there is no such capture."""
        return function

    @abstractmethod
    def get_op_name(self, op_call: Any) -> str:
        """The operator's name in the YAML tables: spelling variants of one operator share a name."""

    @property
    @abstractmethod
    def local_op_names(self) -> frozenset[str]:
        """Operators that act on the local tensor as it is (autograd plumbing, dtype and device queries)."""

    @abstractmethod
    def is_native_dtensor(self, x: Any) -> bool:
        """Whether ``x`` is the framework's own distributed tensor."""

    @abstractmethod
    def take_native_dtensor(self, tensor: Any) -> NativeDTensor:
        """Take the framework's own distributed tensor apart; same storage and graph.

        Raises:
            TypeError: something else, or a framework that has none.
            ValueError: a placement without a counterpart.
        """

    @abstractmethod
    def make_native_dtensor(self, parts: NativeDTensor) -> Any:
        """Put the framework's own distributed tensor together; same storage and graph."""

    @abstractmethod
    def native_mesh(self, mesh: Any) -> Any:
        """The framework's own mesh with the ranks and groups of a DeviceMesh."""

    # -- random numbers ---------------------------------------------------------------------------------------------

    @abstractmethod
    def draw_seed(self) -> int:
        """Draw a 62-bit seed from the default generator, moving it on (so that its saved state replays the draw)."""

    @abstractmethod
    def peek_seed(self) -> int:
        """What :meth:`draw_seed` would draw next; the generator stays where it is."""

    @abstractmethod
    def set_seed(self, seed: int) -> None:
        """Seed the default generator."""

    @abstractmethod
    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        """A context in which random operators draw from a generator seeded with ``seed``; restored on exit."""

    # -- loss parallel ------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def loss_kernels(self) -> LossKernels:
        """K1-K3."""

    @property
    @abstractmethod
    def loss_op_names(self) -> Mapping[str, str]:
        """Operator name -> ``"cross_entropy"``, ``"log_softmax"`` or ``"nll_loss"``."""

    @abstractmethod
    def bind_loss_arguments(
        self, kind: str, op_call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LossArguments:
        """Read the arguments of a call whose operator means ``kind``, unchecked: the ranks agree on errors later.

        Raises:
            TypeError: arguments that the operator does not take.
        """

    @abstractmethod
    def loss_parallel_hook(
        self, intercept: Callable[[str, Any, Sequence[Any], Mapping[str, Any]], Any]
    ) -> AbstractContextManager[Any]:
        """A context, entered by ``loss_parallel()``, that offers the framework's own DTensors to ``intercept``."""

    @abstractmethod
    def sum_tokens(self, x: Tensor) -> Tensor:
        """Sum of all elements, a scalar, differentiable, in at least fp32."""

    @abstractmethod
    def divide(self, x: Tensor, y: Tensor) -> Tensor:
        """``x / y`` of scalars, differentiable, 0/0 = NaN."""

    @abstractmethod
    def stack(self, tensors: Iterable[Tensor]) -> Tensor:
        """Stack scalars into a vector."""
