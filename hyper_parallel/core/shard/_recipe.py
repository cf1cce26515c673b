"""A compiled plan: what the cache keeps, and how a call with a known key runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.redistribute import redistribute_local, redistribution_steps, reduce_gradient
from hyper_parallel.core.shard.distributed_op import OpCall, OpPlan, Path, TensorArg
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform import Platform, get_platform

__all__ = ["Recipe", "compile_recipe", "is_inplace", "wrap_replicated"]

@dataclass(frozen=True)
class _Slot:
    """Stands for the n-th tensor of the call in a template."""

    index: int


@dataclass(frozen=True)
class _Action:
    """What happens to one input before the local operator: move it, then all-reduce its gradient over mesh dims."""

    source: Layout
    target: Layout
    reduce_dims: tuple[int, ...]

    def apply(self, x: Any, platform: Platform) -> Any:
        """``x`` itself where nothing has to happen."""
        if self.source is not self.target:
            x = redistribute_local(platform.as_local(x), self.source, self.target)
        if self.reduce_dims and platform.requires_grad(x):
            x = reduce_gradient(platform.as_local(x), self.target, self.reduce_dims)
        return x


class Recipe:
    """Run the operator on local tensors: fill in changed inputs, call, dress the result."""

    __slots__ = ("_actions", "_args", "_inplace", "_kwargs", "_name", "_platform", "_replaces", "_run", "_wrap")

    def __init__(
        self,
        name: str,
        *,
        wrap: Callable[[Any, Sequence[Any], bool], Any],
        actions: Sequence[_Action | None] = (),
        template: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        run: Callable[..., Any] | None = None,
        replaces: bool = False,
    ) -> None:
        self._name = name
        self._wrap = wrap
        self._actions = tuple((i, a) for i, a in enumerate(actions) if a is not None)
        self._args: tuple[Any, ...] | None = None if template is None else template[0]
        self._kwargs: dict[str, Any] | None = None if template is None else template[1]
        self._run = run
        self._replaces = replaces  # arguments other than tensors
        self._inplace = is_inplace(name)
        self._platform = get_platform()

    def run(
        self,
        op_call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Any],
        check: bool = False,
    ) -> Any:
        """Run one call whose tensors, in order of appearance, are ``tensors``."""
        first = args[0] if args else next(iter(kwargs.values()), None)
        if self._args is not None and self._kwargs is not None:
            filled = [*tensors]
            changed = self._replaces
            for i, action in self._actions:
                filled[i] = action.apply(filled[i], self._platform)
                changed = changed or filled[i] is not tensors[i]
            if changed:
                args = [_fill(a, filled) for a in self._args]
                kwargs = {k: _fill(v, filled) for k, v in self._kwargs.items()}
        if self._run is not None:
            local_args = [_localize(a) for a in args]
            result = self._run(op_call, *local_args, **{k: _localize(v) for k, v in kwargs.items()})
        else:
            result = self._platform.call_local(op_call, args, kwargs)
        if self._inplace or result is NotImplemented:  # the latter: Python asks the other operand next
            return result if result is NotImplemented else first
        return self._wrap(result, tensors, check)


def is_inplace(name: str) -> bool:
    """Whether an operator writes to its first argument: ``add_``, ``x[i] = v``."""
    return name == "setitem" or (name.endswith("_") and not name.startswith("_"))


def _localize(x: Any) -> Any:
    platform = get_platform()
    if platform.is_tensor(x):
        return platform.as_local(x)
    if type(x) in (tuple, list):
        return type(x)(_localize(i) for i in x)
    return x


def _fill(template: Any, tensors: Sequence[Any]) -> Any:
    if type(template) is _Slot:
        return tensors[template.index]
    if type(template) in (tuple, list):
        return type(template)([_fill(t, tensors) for t in template])
    return template


def wrap_replicated(cls: type, mesh: DeviceMesh) -> Callable[[Any, Sequence[Any], bool], Any]:
    """Every tensor of the result is replicated: for operators whose inputs all are."""
    placements = [Replicate()] * mesh.ndim
    platform = get_platform()
    known: dict[tuple[int, ...], Layout] = {}

    def layout_of(shape: tuple[int, ...]) -> Layout:
        layout = known.get(shape)
        if layout is None:
            if len(known) >= 64:  # shapes that depend on values; those of one call hardly ever change
                known.clear()
            layout = known[shape] = Layout(mesh, placements, shape)
        return layout

    def wrap(result: Any, tensors: Sequence[Any], check: bool) -> Any:
        if platform.is_tensor(result):
            if isinstance(result, cls):
                return result
            layout = layout_of(platform.shape(result))
            return platform.as_dtensor(cls, result, layout, fresh=_is_new(result, tensors))
        if isinstance(result, (tuple, list)):
            return _rebuild(type(result), [wrap(r, tensors, check) for r in result])
        return result

    return wrap


def _wrap_as(
    cls: type, name: str, outputs: Layout | Sequence[Layout] | None
) -> Callable[[Any, Sequence[Any], bool], Any]:
    platform = get_platform()

    def dress(local: Any, layout: Layout, tensors: Sequence[Any], check: bool) -> Any:
        if check and platform.shape(local) != layout.local_shape:
            raise UnsupportedOperatorError(
                f"{name}: the local result has shape {platform.shape(local)}, but the rule infers {layout.describe()} "
                f"with local shape {layout.local_shape}; the rule is wrong for this call"
            )
        if isinstance(local, cls):
            if local._layout == layout:  # type: ignore[attr-defined]
                return local
            local = platform.as_local(local)
        return platform.as_dtensor(cls, local, layout, fresh=_is_new(local, tensors))

    if outputs is None:
        return lambda result, tensors, check: result
    if isinstance(outputs, Layout):
        single = outputs
        return lambda result, tensors, check: dress(result, single, tensors, check)
    layouts = outputs

    def several(result: Any, tensors: Sequence[Any], check: bool) -> Any:
        return _rebuild(type(result), [dress(r, o, tensors, check) for r, o in zip(result, layouts, strict=True)])

    return several


def _is_new(result: Any, tensors: Sequence[Any]) -> bool:
    """Whether nobody else holds the result: it is not one of the inputs."""
    for t in tensors:
        if t is result:
            return False
    return True


def _rebuild(kind: type, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def compile_recipe(
    cls: type,
    call: OpCall,
    plan: OpPlan,
    locations: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Recipe:
    """Turn a plan by argument names into one by positions."""
    paths = _slot_paths(call, locations, args, kwargs)
    if len(paths) != _count_tensors((*args, *kwargs.values())):
        raise UnsupportedOperatorError(f"{call.describe()}: tensors in nested sequences are not supported")
    outputs = plan.outputs if not isinstance(plan.outputs, Layout) else (plan.outputs,)
    actions: list[_Action | None] = []
    for path in paths:
        arg = _argument(call, path)
        target = plan.inputs.get(path, arg.layout)
        _check_move(call, arg.layout, target)
        dims = tuple(
            d
            for d, p in enumerate(target.placements)
            if p.is_replicate() and any(not o.placements[d].is_replicate() for o in outputs or ())
        )
        moved = target != arg.layout
        actions.append(_Action(arg.layout, target if moved else arg.layout, dims) if moved or dims else None)
    if is_inplace(call.name):
        target = _argument(call, paths[0]).layout
        if not isinstance(plan.outputs, Layout) or plan.outputs != target:
            found = plan.outputs.describe() if isinstance(plan.outputs, Layout) else "several results"
            raise UnsupportedOperatorError(
                f"{call.describe()}: in place needs a result that lies like the tensor it is written to; found {found}"
            )
    template = None
    if plan.replace or any(a is not None for a in actions):
        template = _template(args, kwargs, locations, plan.replace)
    return Recipe(
        call.name,
        wrap=_wrap_as(cls, call.name, plan.outputs),
        actions=actions,
        template=template,
        run=plan.run,
        replaces=bool(plan.replace),
    )


def _check_move(call: OpCall, source: Layout, target: Layout) -> None:
    for _, before, _ in redistribution_steps(source.placements, target.placements):
        if before.is_shard():
            raise UnsupportedOperatorError(
                f"{call.describe()}: would have to gather {source.describe()}; dispatch never does so by itself, "
                "redistribute first"
            )


def _argument(call: OpCall, path: Path) -> TensorArg:
    value = call.args[path] if isinstance(path, str) else call.args[path[0]][path[1]]
    if not isinstance(value, TensorArg):
        raise TypeError(f"{call.name}: {path} is not a tensor")
    return value


def _slot_paths(
    call: OpCall, locations: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Path]:
    """Paths of the tensors, in order of appearance in the call."""
    order: list[Path] = []
    by_place: dict[Any, str] = {place: name for name, place in locations.items()}
    starred = next(((name, place[1]) for name, place in locations.items() if isinstance(place, tuple)), None)

    def visit(name: str, value: Any) -> None:
        if isinstance(value, TensorArg):
            order.append(name)
        elif isinstance(value, (tuple, list)):
            order.extend((name, i) for i, v in enumerate(value) if isinstance(v, TensorArg))

    for i in range(len(args)):
        if i in by_place:
            visit(by_place[i], call.args[by_place[i]])
        elif starred and i == starred[1]:
            visit(starred[0], call.args[starred[0]])
    for key in kwargs:
        visit(by_place[key], call.args[by_place[key]])
    return order


def _count_tensors(x: Any) -> int:
    if type(x) in (tuple, list):
        return sum(map(_count_tensors, x))
    return int(get_platform().is_tensor(x))


def _template(
    args: Sequence[Any], kwargs: Mapping[str, Any], locations: Mapping[str, Any], replace: Mapping[Path, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    platform = get_platform()
    counter = 0

    def blank(x: Any) -> Any:
        nonlocal counter
        if platform.is_tensor(x):
            counter += 1
            return _Slot(counter - 1)
        if type(x) in (tuple, list):
            return type(x)([blank(i) for i in x])
        return x

    new_args = [blank(a) for a in args]
    new_kwargs = {k: blank(v) for k, v in kwargs.items()}
    for path, value in replace.items():
        name, element = (path, None) if isinstance(path, str) else path
        place = locations.get(name, name)
        if element is not None:
            owner: Any = new_args if isinstance(place, int) else new_kwargs
            items = list(owner[place])
            items[element] = value
            value = type(owner[place])(items)
        if isinstance(place, int):
            new_args[place] = value
        elif isinstance(place, tuple):
            new_args[place[1] :] = list(value)
        else:
            new_kwargs[place] = value
    return tuple(new_args), new_kwargs
