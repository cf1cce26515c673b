"""Logits that are not computed: what a last layer gives whose loss is computed together with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hyper_parallel.core.dtensor import DTensor, dispatcher
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.redistribute import redistribute_local
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.loss_parallel.op_names import loss_kind
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.values import StandIn

__all__ = ["LastLayer", "UncomputedLogits"]


@dataclass(frozen=True, eq=False)
class LastLayer:
    """A linear layer whose rows are shared, as it was when its forward ran.

    Attributes:
        weight: this rank's rows, ``[V_local, H]``.
        bias: ``[V_local]`` or None.
        num_classes: V.
        compute: from whole hidden states, equal on all ranks, to class-sharded logits.
        chunk_size: tokens whose logits are there at a time; None: the library's choice.
    """

    weight: Tensor
    bias: Tensor | None
    num_classes: int
    compute: Callable[[Tensor], DTensor]
    chunk_size: int | None = None


class _Refused(UnsupportedOperatorError, AttributeError):
    """Also an AttributeError, so that ``hasattr`` answers."""


class UncomputedLogits(StandIn):
    """Logits ``[..., V]`` of hidden states ``[..., H]`` and a shared last layer, until something asks for their loss.

    It knows shape, dtype and device, and takes what model code does with logits before the loss: ``float``, ``to``,
    ``contiguous``, and ``view``, ``reshape``, ``flatten`` and indexing that leave the class dim (the last one) whole.
    The framework's cross-entropy inside ``loss_parallel()`` is :func:`linear_cross_entropy`. ``materialize()`` computes
    the logits. Everything else raises :class:`UnsupportedOperatorError`.

    Indexing hidden states that are sharded over the sequence gathers them (all-gather; backward keeps each rank's
    part).
    """

    __hash__ = object.__hash__

    def __init__(
        self,
        hidden: Tensor,
        layout: Layout,
        layer: LastLayer,
        tokens: tuple[int, ...] | None = None,
        probe: Tensor | None = None,
    ) -> None:
        """``hidden`` is the local tensor, replicated or sharded over one dim of tokens; ``tokens``: the logits' shape
        without classes; ``probe``: an element with their dtype."""
        self.hidden, self.hidden_layout, self.layer = hidden, layout, layer
        self.tokens = layout.shape[:-1] if tokens is None else tokens
        self.probe = get_platform().zeros((1,), hidden) if probe is None else probe

    # -- what is known without the values ------------------------------------------------------------------------

    @property
    def shape(self) -> Any:
        """The global shape, all classes included."""
        return type(self.probe.shape)((*self.tokens, self.layer.num_classes))

    @property
    def dtype(self) -> Any:
        """The framework's dtype."""
        return self.probe.dtype

    @property
    def device(self) -> Any:
        """The framework's device."""
        return self.probe.device

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.tokens) + 1

    def dim(self) -> int:
        """Number of dims."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of a dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        name = get_platform().dtype_name(self.probe)
        return f"UncomputedLogits(shape={tuple(self.shape)}, {name}, {self.hidden_layout.mesh.describe()})"

    @property
    def global_layout(self) -> Layout:
        """Where the logits would lie."""
        return Layout(self.hidden_layout.mesh, [Shard(self.ndim - 1)], tuple(self.shape))

    # -- another dtype -------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> UncomputedLogits:
        """As the framework's, on the same device; the loss is computed in at least fp32 in any case."""
        return self._with_probe(self.probe.to(*args, **kwargs))

    def astype(self, dtype: Any) -> UncomputedLogits:
        """MindSpore's name for :meth:`to`."""
        return self.to(dtype)

    def type_as(self, other: Any) -> UncomputedLogits:
        """The dtype of another tensor."""
        return self.to(other.dtype)

    def float(self) -> UncomputedLogits:
        """fp32."""
        return self._with_probe(self.probe.float())

    def double(self) -> UncomputedLogits:
        """fp64."""
        return self._with_probe(self.probe.double())

    def half(self) -> UncomputedLogits:
        """fp16."""
        return self._with_probe(self.probe.half())

    def bfloat16(self) -> UncomputedLogits:
        """bf16."""
        return self._with_probe(self.probe.bfloat16())

    # -- another shape -------------------------------------------------------------------------------------------

    def contiguous(self) -> UncomputedLogits:
        """The same."""
        return self

    def reshape(self, *shape: Any) -> UncomputedLogits:
        """Tokens in other dims; the last dim stays the classes."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        sizes = list(given)
        if not all(isinstance(s, int) for s in sizes):
            raise self._refuse(f"reshape to {tuple(sizes)}")
        if sizes.count(-1) == 1:
            known = -prod(sizes)
            sizes[sizes.index(-1)] = self.numel() // known if known else 0
        if prod(sizes) != self.numel() or min(sizes, default=0) < 0:
            raise ValueError(f"shape {tuple(given)} is invalid for logits of shape {tuple(self.shape)}")
        if sizes[-1] != self.layer.num_classes:
            raise self._refuse(f"reshape to {tuple(sizes)}, which does not keep the classes as the last dim,")
        return self._with_tokens(tuple(sizes[:-1]))

    def view(self, *shape: Any) -> UncomputedLogits:
        """As :meth:`reshape`."""
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> UncomputedLogits:
        """Tokens in one dim."""
        sizes, first, last = list(self.shape), start_dim % self.ndim, end_dim % self.ndim
        return self.reshape([*sizes[:first], prod(sizes[first : last + 1]), *sizes[last + 1 :]])

    def __getitem__(self, index: Any) -> UncomputedLogits:
        parts = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(p, bool) or not (p is Ellipsis or isinstance(p, (int, slice))) for p in parts):
            raise self._refuse("indexing with other than numbers, slices and '...'")
        gaps = [i for i, p in enumerate(parts) if p is Ellipsis]
        place = gaps[0] if gaps else len(parts)
        missing = self.ndim - len(parts) + len(gaps)
        if len(gaps) > 1 or missing < 0:
            raise IndexError(f"index {index} of logits of shape {tuple(self.shape)}")
        parts[place : place + 1] = [slice(None)] * missing
        if parts[-1] not in (slice(None), slice(0, None), slice(None, self.layer.num_classes)):
            raise self._refuse("indexing of the classes")
        if all(p == slice(None) for p in parts):
            return self
        hidden = self.whole_hidden()[tuple(parts[:-1])]
        layout = Layout(self.hidden_layout.mesh, [Replicate()], get_platform().shape(hidden))
        return UncomputedLogits(hidden, layout, self.layer, probe=self.probe)

    # -- the values ----------------------------------------------------------------------------------------------

    def whole_hidden(self) -> Tensor:
        """Hidden states ``[*tokens, H]``, equal on all ranks and with whole gradients; gathered where sharded."""
        layout = self.hidden_layout
        local = redistribute_local(self.hidden, layout, layout.replace([Replicate()]))
        return get_platform().reshape(local, (*self.tokens, layout.shape[-1]))

    def materialize(self) -> DTensor:
        """The logits, computed now: a DTensor sharded over the classes, differentiable.

        Collectives: those of a column-parallel layer; an all-gather where the hidden states are sharded.
        """
        logits = self.layer.compute(self.whole_hidden())
        return logits if logits.dtype == self.dtype else logits.to(self.dtype)  # type: ignore[attr-defined,no-any-return]

    # -- everything else -----------------------------------------------------------------------------------------

    @classmethod
    def _dispatch(cls, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = get_platform().get_op_name(op_call)
        own = next(x for x in _leaves((*args, *kwargs.values())) if isinstance(x, cls))
        if loss_kind(name) is not None and dispatcher.loss_handler is not None:
            result = dispatcher.loss_handler(name, op_call, args, kwargs)
            if result is not NotImplemented:
                return result
        if name in _METHODS and args and args[0] is own:
            return getattr(own, name)(*args[1:], **kwargs)
        raise own._refuse(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refuse(name)

    def _refuse(self, what: str) -> UnsupportedOperatorError:
        return _Refused(
            f"{what} on the logits of a 'linear_loss' layer, of shape {tuple(self.shape)}, which are not computed; "
            "expected their cross-entropy as [tokens, classes] inside loss_parallel(). For other work, such as "
            "evaluation or generation, materialize() computes them, class-sharded"
        )

    def _with_probe(self, probe: Tensor) -> UncomputedLogits:
        if probe.device != self.probe.device or not get_platform().is_floating_point(probe):
            raise self._refuse(f"conversion to {probe.dtype} on {probe.device}")
        return UncomputedLogits(self.hidden, self.hidden_layout, self.layer, self.tokens, probe)

    def _with_tokens(self, tokens: tuple[int, ...]) -> UncomputedLogits:
        return UncomputedLogits(self.hidden, self.hidden_layout, self.layer, tokens, self.probe)


_METHODS = frozenset({"reshape", "view", "flatten", "float", "double", "half", "bfloat16", "to", "contiguous", "numel"})
_OPERATORS = (
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or",
                                       "xor") for side in ("", "r", "i")),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "iter", "bool",
                                 "float", "int", "array", "setitem", "contains")),
)  # fmt: skip


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: UncomputedLogits, *_: Any, **__: Any) -> Any:
        raise self._refuse(name)

    return method


for _name in _OPERATORS:
    setattr(UncomputedLogits, _name, _refusing(_name))
