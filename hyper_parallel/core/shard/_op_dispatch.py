"""OpDispatcher: every operator on a DTensor comes through :meth:`OpDispatcher.dispatch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard._binding import bind_arguments
from hyper_parallel.core.shard._recipe import Recipe, compile_recipe, wrap_replicated
from hyper_parallel.core.shard.distributed_op import OpCall, TensorArg
from hyper_parallel.core.shard.metadata import METADATA_OPS, VALUE_OPS, host_value
from hyper_parallel.core.shard.parallel_ops_register import OpEntry, find_op
from hyper_parallel.core.state import current_state
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform import get_platform

__all__ = ["LayoutCacheManager", "OpDispatcher"]

LossHandler = Callable[[str, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


class LayoutCacheManager:
    """Recipes by (operator, layouts, other arguments, loss-parallel state); bounded, oldest entry out first.

    The loss-parallel state is part of every key: the same call in and out of the context never shares an entry.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._entries: dict[Any, Recipe] = {}
        self.hits = 0
        self.misses = 0

    def get(self, key: Any) -> Recipe | None:
        """The recipe stored under ``key``."""
        recipe = self._entries.get(key)
        if recipe is None:
            self.misses += 1
        else:
            self.hits += 1
        return recipe

    def put(self, key: Any, recipe: Recipe) -> None:
        """Store a recipe."""
        if len(self._entries) >= self._capacity:
            self._entries.pop(next(iter(self._entries)), None)
        self._entries[key] = recipe

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.hits = self.misses = 0

    def keys(self) -> list[Any]:
        """The stored keys."""
        return list(self._entries)


class OpDispatcher:
    """From a framework operator on DTensors to the same operator on local tensors.

    The order is fixed: operators that need no layout (autograd plumbing, metadata, values on the host); loss parallel,
    when its table names the operator; then layout inference, which serves random operators too.
    """

    def __init__(self) -> None:
        self.dtensor_class: type = object
        self.cache = LayoutCacheManager()
        self.loss_handler: LossHandler | None = None
        self.loss_op_names: Any = frozenset()
        self._platform = get_platform()
        self._without_layout = {*self._platform.local_op_names, *METADATA_OPS, *VALUE_OPS}

    def dispatch(self, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator.

        Raises:
            UnsupportedOperatorError: no rule for the operator or its layouts.
        """
        name = self._platform.get_op_name(op_call)
        state = current_state()
        if state.skip_dispatch or name in self._without_layout:
            return self._dispatch_without_layout(name, op_call, args, kwargs, state.skip_dispatch)
        if name in self.loss_op_names:
            result = self._dispatch_loss_parallel(op_call, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._dispatch_layout_infer(name, op_call, args, kwargs, (state.loss_parallel, state.strict))

    def _dispatch_without_layout(
        self, name: str, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], skip: bool
    ) -> Any:
        """Operators on the local tensors as they are, questions about the shape, and values on the host."""
        if skip or name in self._platform.local_op_names:
            return self._platform.call_local(op_call, args, kwargs)
        if name in METADATA_OPS:
            return METADATA_OPS[name](*args, **kwargs)
        return host_value(op_call, args, kwargs)

    def _dispatch_loss_parallel(
        self, op_call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Offer the call to loss parallel; NotImplemented leaves it to layout inference."""
        if self.loss_handler is None:
            return NotImplemented
        return self.loss_handler(self._platform.get_op_name(op_call), op_call, args, kwargs)

    def _dispatch_layout_infer(
        self,
        name: str,
        op_call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss_state: tuple[bool, bool],
    ) -> Any:
        tensors: list[Any] = []
        with self._platform.local_mode():  # for the dtypes
            positional = self._key(args, tensors)
            named = (*kwargs, self._key(tuple(kwargs.values()), tensors)) if kwargs else ()
            key: Any = (name, positional, named, loss_state)
        try:
            recipe = self.cache.get(key)
        except TypeError:  # an argument without a hash: infer anew each time
            key, recipe = None, None
        if recipe is not None:
            return recipe.run(op_call, args, kwargs, tensors)
        recipe = self._infer(name, args, kwargs, tensors)
        result = recipe.run(op_call, args, kwargs, tensors, check=True)
        if key is not None:
            self.cache.put(key, recipe)
        return result

    def _key(self, items: Sequence[Any], tensors: list[Any]) -> tuple[Any, ...]:
        """What a plan may depend on, of each item: everything but the values of tensors; collects the tensors."""
        cls = self.dtensor_class
        dtype = self._platform.local_dtype
        key: list[Any] = []
        for x in items:
            kind = type(x)
            if kind is cls:
                tensors.append(x)
                key += (x._layout, dtype(x))
            elif kind is int or kind is str or x is None:
                key.append(x)
            elif kind is tuple or kind is list:
                key += (kind, self._key(x, tensors))
            elif kind is slice:
                key += (kind, self._key((x.start, x.stop, x.step), tensors))
            elif isinstance(x, cls):
                tensors.append(x)
                key += (x._layout, dtype(x))  # type: ignore[attr-defined]
            elif self._platform.is_tensor(x):
                tensors.append(x)
                key += ("plain", self._platform.shape(x), dtype(x))
            else:
                key += (kind, x)
        return tuple(key)

    def _infer(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any]
    ) -> Recipe:
        layouts = [t._layout for t in tensors if isinstance(t, self.dtensor_class)]  # type: ignore[attr-defined]
        if not layouts:
            raise UnsupportedOperatorError(f"{name}: a DTensor inside a nested argument is not supported")
        mesh = layouts[0].mesh
        for layout in layouts[1:]:
            if layout.mesh != mesh:
                raise UnsupportedOperatorError(
                    f"{name}: tensors lie on two meshes, {mesh.describe()} and {layout.mesh.describe()}; "
                    "expected one"
                )
        entry = find_op(self._platform.name, name)
        replicated = all(layout.is_replicated for layout in layouts)
        if replicated and not (entry and entry.options.get("random")):
            return Recipe(name, wrap=wrap_replicated(self.dtensor_class, mesh))
        if entry is None:
            found = "; ".join(layout.describe() for layout in layouts)
            raise UnsupportedOperatorError(
                f"operator {name!r} has no distributed rule for sharded tensors (found {found}). Redistribute to "
                "Replicate first, or register a rule with register_distributed_op and a YAML table "
                "(HYPER_PARALLEL_OPS_YAML_DIR, HYPER_PARALLEL_OPS_PYTHON_PATH)"
            )
        if kwargs.get("out") is not None:
            raise UnsupportedOperatorError(f"operator {name!r}: out= is not supported on DTensors")
        try:
            return self._plan(entry, name, args, kwargs, mesh, lambda layout: layout)
        except UnsupportedOperatorError:
            if all(layout == _without_lonely_shards(layout) for layout in layouts):
                raise
        return self._plan(entry, name, args, kwargs, mesh, _without_lonely_shards)

    def _plan(
        self,
        entry: OpEntry,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mesh: DeviceMesh,
        view: Callable[[Layout], Layout],
    ) -> Recipe:
        call, locations = self._bind(entry, name, args, kwargs, mesh, view)
        plan = entry.family.plan(call)
        return compile_recipe(self.dtensor_class, call, plan, locations, args, kwargs)

    def _bind(
        self,
        entry: OpEntry,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mesh: DeviceMesh,
        view: Callable[[Layout], Layout],
    ) -> tuple[OpCall, dict[str, Any]]:
        def describe(x: Any) -> Any:
            if isinstance(x, self.dtensor_class):
                return TensorArg(view(x._layout), False, self._platform.dtype_name(x))  # type: ignore[attr-defined]
            if self._platform.is_tensor(x):
                layout = Layout(mesh, [Replicate()] * mesh.ndim, self._platform.shape(x))
                return TensorArg(layout, True, self._platform.dtype_name(x))
            if isinstance(x, (tuple, list)):
                return type(x)(describe(i) for i in x) if type(x) in (tuple, list) else x
            return x

        bound, locations = bind_arguments(entry.signature, name, args, kwargs)
        return OpCall(name, {k: describe(v) for k, v in bound.items()}, mesh, entry.options), locations


def _without_lonely_shards(layout: Layout) -> Layout:
    """Replicate instead of Shard on mesh dims of size 1, where both mean the same."""
    sizes = layout.mesh.shape
    return layout.replace(
        [Replicate() if n == 1 and p.is_shard() else p for n, p in zip(sizes, layout.placements, strict=True)]
    )
