"""DTensor: a local shard that knows the global tensor it belongs to.

Importing this module settles which backend the process uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.redistribute import redistribute_local, reduce_gradient
from hyper_parallel.core.shard._op_dispatch import OpDispatcher
from hyper_parallel.core.state import current_state
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Tensor

__all__ = ["DTensor", "distribute_tensor"]

_base: Any = get_platform().tensor_base
_opaque = get_platform().opaque
dispatcher = OpDispatcher()


class DTensor(_base):  # type: ignore[misc]
    """The framework's tensor class with a global shape: the object *is* the local shard, dressed with a layout.

    ``shape`` is global; autograd, memory, dtype and device are the local tensor's. Operators go through
    :class:`OpDispatcher`, which infers the layout of the result and runs the operator on the local tensors.
    The gradient of a replicated tensor is the whole gradient, equal on every rank; of a sharded one its shard.

    Create one with :meth:`from_local` or :func:`distribute_tensor`.
    """

    _layout: Layout

    @classmethod
    def _dispatch(cls, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return dispatcher.dispatch(op_call, args, kwargs)

    @classmethod
    def _skips_dispatch(cls) -> bool:
        return current_state().skip_dispatch

    @classmethod
    @_opaque
    def from_local(
        cls,
        local: Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int] | None = None,
    ) -> DTensor:
        """Say of a local tensor that it is this rank's part of a global one. No collective, no copy.

        Args:
            local: this rank's part.
            mesh: where it lies.
            placements: one per mesh dim.
            shape: the global shape. Without it every shard is taken to be as large as this one; uneven shards need it.

        Raises:
            ValueError: ``local`` has not the shape that ``shape`` and ``placements`` give this rank.

        Example:
            >>> logits = DTensor.from_local(local, mesh["tp"], [Shard(-1)], shape=(8, 32003))  # doctest: +SKIP
        """
        platform = get_platform()
        if not platform.is_tensor(local) or isinstance(local, DTensor):
            raise TypeError(f"from_local takes a plain {platform.name} tensor, found {type(local).__name__}")
        local_shape = platform.shape(local)
        if shape is None:
            shape = _even_shape(mesh, placements, local_shape)
        layout = Layout(mesh, placements, shape)
        if local_shape != layout.local_shape:
            raise ValueError(
                f"local tensor has shape {local_shape}, but {layout.describe()} gives rank {platform.rank()} "
                f"{layout.local_shape}"
            )
        result: DTensor = platform.as_dtensor(cls, local, layout)
        return result

    @_opaque
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's part as a plain tensor, on the same graph. No collective, no copy.

        Args:
            grad_placements: what the gradient that comes back will be, when it is not the dual of ``placements``:
                ``Partial()`` on a mesh dim where this tensor is replicated says that each rank uses it for work of
                its own, and the terms are all-reduced in backward.
        """
        platform = get_platform()
        local = platform.as_local(self)
        if grad_placements is not None:
            grads = Layout(self._layout.mesh, grad_placements, self._layout.shape).placements
            partial = [d for d, p in enumerate(grads) if p.is_partial()]
            expected = self._layout.gradient_layout.placements
            wrong = [d for d, p in enumerate(grads) if d not in partial and p != expected[d]]
            wrong += [d for d in partial if not expected[d].is_replicate()]
            if wrong:
                raise ValueError(
                    f"grad_placements {[str(p) for p in grads]} do not fit {self._layout.describe_placements()}; "
                    f"expected {[str(p) for p in expected]}, or Partial where that is R"
                )
            if partial:
                local = reduce_gradient(local, self._layout, partial)
        return local

    @_opaque
    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank, differentiable. All-gathers shards and all-reduces partial sums."""
        return self.redistribute(placements=[Replicate()] * self._layout.mesh.ndim).to_local()

    @_opaque
    def redistribute(
        self, mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """The same global tensor with other placements. Differentiable; collectives as in :mod:`.redistribute`.

        Raises:
            ValueError: another mesh.
        """
        source = self._layout
        if mesh is not None and mesh != source.mesh:
            raise ValueError(f"cannot move {source.describe()} to another mesh, {mesh.describe()}")
        if placements is None:
            raise ValueError("redistribute needs placements")
        target = source.replace(placements)
        local = redistribute_local(get_platform().as_local(self), source, target)
        result: DTensor = get_platform().as_dtensor(type(self), local, target)
        return result

    @property
    def global_layout(self) -> Layout:
        """Mesh, placements and global shape (``layout`` is the memory format in PyTorch)."""
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One per mesh dim."""
        return self._layout.placements

    def __repr__(self, **_: Any) -> str:
        platform = get_platform()
        layout = self._layout
        local = platform.as_local(self)
        head = f"DTensor(shape={layout.shape}, {platform.dtype_name(local)}, {layout.describe_placements()}"
        return f"{head}, {layout.mesh.describe()}, local={platform.detach(local)!r})"

    __str__ = __repr__

    def __iter__(self) -> Any:
        if not self._layout.shape:
            raise TypeError("iteration over a 0-d DTensor")
        return (self[i] for i in range(self._layout.shape[0]))

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d DTensor")
        return self._layout.shape[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DTensor cannot be pickled: save to_local() or full_tensor()")

    def __copy__(self) -> DTensor:
        platform = get_platform()
        result: DTensor = platform.as_dtensor(type(self), platform.as_local(self), self._layout)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        platform = get_platform()
        local = platform.as_local(self)
        copied = platform.copy_leaf(local)
        result: DTensor = platform.as_dtensor(type(self), copied, self._layout, fresh=True)
        return result


dispatcher.dtensor_class = DTensor


@_opaque
def distribute_tensor(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut a tensor that every rank holds whole. Each rank keeps a copy of its own part; no collective forward.

    Differentiable: the gradient of ``tensor`` is whole on every rank (all-gather in backward).

    Args:
        tensor: the global tensor, equal on all ranks.
        mesh: where to lay it.
        placements: one per mesh dim.

    Example:
        >>> d = distribute_tensor(full, mesh, [Shard(-1)])      # doctest: +SKIP
    """
    platform = get_platform()
    if not platform.is_tensor(tensor) or isinstance(tensor, DTensor):
        raise TypeError(f"distribute_tensor takes a plain {platform.name} tensor, found {type(tensor).__name__}")
    shape = platform.shape(tensor)
    whole = Layout(mesh, [Replicate()] * mesh.ndim, shape)
    target = whole.replace(placements)
    local = platform.clone(redistribute_local(tensor, whole, target))  # a view would keep the whole alive
    result: DTensor = platform.as_dtensor(DTensor, local, target, fresh=True)
    return result


def _even_shape(mesh: DeviceMesh, placements: Sequence[Placement], local_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The global shape if every rank's part is as large as this one."""
    normal = Layout(mesh, placements, local_shape).placements
    shape = list(local_shape)
    for size, p in zip(mesh.shape, normal, strict=True):
        if isinstance(p, Shard):
            shape[p.dim] *= size
    return tuple(shape)
