"""What runs in the place of a layer's forward once the layer is shared between ranks.

A rule is all settings and no state: it takes the weights from the module it is called with. The library's
own layers and the styles of a plan run the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.tensor_parallel.activations import deliver, fetch, fetch_for_shards, is_whole, shape_of
from hyper_parallel.tensor_parallel.alike import raise_alike
from hyper_parallel.tensor_parallel.even import DTENSOR_SAYS, check_dim, ensure_even
from hyper_parallel.tensor_parallel.regions import ReduceFromTPRegion, copy_to_tp_region, scatter_to_tp_region
from hyper_parallel.tensor_parallel.replicas import ReplicaSum
from hyper_parallel.tensor_parallel.shared_input import SharedInput
from hyper_parallel.tensor_parallel.widths import ensure_whole_features, sharded_size

__all__ = ["ColumnRule", "EmbeddingColumnRule", "RowRule", "Rule", "VocabRule"]

_LAST = Shard(-1)
_SEQUENCE_SAYS = f"sequence_length={{size}} in the call, or {DTENSOR_SAYS}"
_opaque = get_platform().opaque  # collectives run as they are, a compiler gets what lies between the layers


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """Settings of a shared module.

    Attributes:
        mesh: the ranks, a 1-D mesh.
        cuts: how the module's own parameters are cut.
        input: how a plain input lies.
        output: how the output shall lie.
        use_local: whether the output is a plain local tensor; else it is a DTensor.
        where: the module's name in the model that was parallelised, for messages; else empty.
    """

    mesh: DeviceMesh
    cuts: Mapping[str, ShardSpec] = field(default_factory=dict)
    input: Placement = field(default_factory=Replicate)
    output: Placement = field(default_factory=Replicate)
    use_local: bool = True
    where: str = ""

    @property
    def group(self) -> Group:
        """The ranks as a group."""
        return self.mesh.get_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> Rule:
        return self

    def place(self, module: Module) -> str:
        """What messages call the module: its name, or its class."""
        return self.where or type(module).__name__.removeprefix("Parallel")

    def __call__(self, module: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        return forward(*args, **kwargs)


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnRule(Rule):
    """A linear layer whose output features are shared: ``y_k = x W_k^T + b_k``.

    Placements: x R (or S(d), gathered) -> y S(-1), then ``output``. Forward needs no collective when the
    input is replicated and the output stays sharded; backward sums the gradient of x over the ranks.

    Attributes:
        transposed: whether the weight is ``[in, out]``.
        overlap: whether that sum runs while the gradient of the weight is computed.
        shared_input: common to layers side by side that take the same input (query, key and value); the one
            sum of its gradient does not overlap.
        replicas: sums the weight gradients of ranks that hold the same heads.
    """

    out_features: int
    transposed: bool = False
    overlap: bool = True
    shared_input: SharedInput | None = None
    replicas: Mapping[str, ReplicaSum] = field(default_factory=dict)

    @_opaque
    def __call__(
        self, module: Module, forward: Callable[..., Any], input: Any, *, sequence_length: int | None = None
    ) -> Any:
        """``sequence_length``: the global size of the dim that a plain sharded input is sharded over, if
        uneven.
        """
        backend, where = get_module_backend(), self.place(module)
        size = sharded_size(input, self.input, self.in_features, where, sequence_length)
        weight, bias = (self._parameter(module, name) for name in ("weight", "bias"))

        def prepare(given: Any) -> Tensor:
            x, shared = fetch_for_shards(given, self.mesh, self.input, size, where=where, say=_SEQUENCE_SAYS)
            return copy_to_tp_region(x, self.group) if shared else x

        if self.shared_input is not None:
            x = self.shared_input.take(input, (self.group.ranks, self.input, size), prepare)
            y = backend.linear(x, weight, bias, self.transposed)
        elif self.overlap and is_whole(input, self.input):
            x = fetch(input, self.mesh, self.input, Replicate(), where=where)
            y = backend.shared_linear(x, weight, bias, self.transposed, self.group)
        else:
            y = backend.linear(prepare(input), weight, bias, self.transposed)
        return _deliver_features(self, y, self.out_features, where)

    @property
    def in_features(self) -> int:
        """The layer's input width."""
        return self.cuts["weight"].shape[0 if self.transposed else 1]

    def _parameter(self, module: Module, name: str) -> Tensor | None:
        parameter = getattr(module, name, None)
        replicas = self.replicas.get(name)
        return parameter if replicas is None or parameter is None else replicas(parameter)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowRule(Rule):
    """A linear layer whose input features are shared: ``y = sum_k x_k W_k^T + b``, the bias added once,
    after the sum.

    Placements: x S(-1) (or R, cut here) -> y P, then ``output``: R by an all-reduce, S(d) by a
    reduce-scatter. Backward needs no collective when the output is replicated.
    """

    in_features: int
    transposed: bool = False

    @_opaque
    def __call__(self, module: Module, forward: Callable[..., Any], input: Any) -> Any:
        where = self.place(module)
        x = self._own_features(input, where)
        y = get_module_backend().linear(x, module.weight, None, self.transposed)
        bias = getattr(module, "bias", None)
        return _deliver_sum(self, y, bias, where, not isinstance(input, DTensor))

    def _own_features(self, input: Any, where: str) -> Tensor:
        shape = shape_of(input)
        last = len(shape) - 1
        if self.input not in (_LAST, Shard(last)) or isinstance(input, DTensor):
            ensure_whole_features(shape, self.in_features, where)
            return fetch(input, self.mesh, self.input, _LAST, where=where)
        own = self.cuts["weight"].local_shape(self.group.rank)[0 if self.transposed else 1]
        if shape[last] != own:
            part = f"the part of rank {self.group.rank} of {self.in_features} over {self.mesh.describe()}"
            raise ValueError(
                f"{where}: the input has {shape[last]} features (shape {shape}); expected {own}, {part}, as a "
                "column-parallel layer before it gives. Where the input is whole: RowwiseParallel(input_layouts="
                "Replicate()), or input_is_parallel=False"
            )
        return input


@dataclass(frozen=True, eq=False, kw_only=True)
class VocabRule(Rule):
    """An embedding whose rows are shared. Each rank looks up the ids that it holds, and the rest are zeros:

    ::

        rank 0: rows 0 .. 2    ids [4, 1] -> [ 0, w1]
        rank 1: rows 3 .. 4    ids [4, 1] -> [w4,  0]     sum: [w4, w1]

    Placements: ids R -> rows P, then ``output``.
    """

    padding_idx: int | None = None
    scale: str | None = None
    weight: str = "weight"

    @_opaque
    def __call__(self, module: Module, forward: Callable[..., Any], input: Any) -> Any:
        spec = self.cuts[self.weight]
        start, stop = spec.ranges[self.group.rank][0]
        where = self.place(module)
        ids = fetch(input, self.mesh, self.input, Replicate(), where=where)
        check_ids(ids, spec.shape[0], self.group, where)
        padding = self.padding_idx
        own_padding = padding - start if padding is not None and start <= padding < stop else None
        rows = get_module_backend().lookup(ids, getattr(module, self.weight), start, own_padding)
        if self.scale is not None:
            rows = get_module_backend().scaled(rows, getattr(module, self.scale))
        return _deliver_sum(self, rows, None, where, False)  # the ids are alike already


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingColumnRule(Rule):
    """An embedding whose width is shared: every rank looks up its columns of all ids.

    Placements: ids R -> rows S(-1), then ``output``.
    """

    out_features: int
    padding_idx: int | None = None
    scale: str | None = None
    weight: str = "weight"

    @_opaque
    def __call__(self, module: Module, forward: Callable[..., Any], input: Any) -> Any:
        where = self.place(module)
        ids = fetch(input, self.mesh, self.input, Replicate(), where=where)
        check_ids(ids, self.cuts[self.weight].shape[0], self.group, where)
        rows = get_module_backend().lookup(ids, getattr(module, self.weight), 0, self.padding_idx)
        if self.scale is not None:
            rows = get_module_backend().scaled(rows, getattr(module, self.scale))
        return _deliver_features(self, rows, self.out_features, where)


def check_ids(ids: Tensor, rows: int, group: Group, where: str) -> None:
    """Refuse ids that no rank holds, or that are not the same kind of tensor on all ranks. On accelerators they are
    not read.

    Collectives: on CPU one all-gather of 16 bytes.

    Raises:
        IndexError: an id outside ``[0, rows)``; on all ranks.
        TypeError: ids that are no integers; on all ranks.
        ValueError: ids of another shape or dtype on another rank; on all ranks.
    """
    platform = get_platform()
    dtype = platform.dtype_name(ids)
    error: Exception | None = None
    if not dtype.startswith(("int", "uint")):
        error = TypeError(f"{where}: the ids of an embedding are {dtype}; expected an integer dtype")
    else:
        found = get_module_backend().id_range(ids)
        if found is not None and not (0 <= found[0] and found[1] < rows):
            error = IndexError(f"{where}: ids from {found[0]} to {found[1]} in an embedding of {rows} rows")
    raise_alike(error, f"{dtype} {platform.shape(ids)}", "ids of equal shapes and dtypes", [group], ids, where)


def beside(parameter: Tensor, x: Tensor) -> Tensor:
    """The parameter, for work on ``x``: where that has no elements, its gradient from there is zeros.

    A rank has none where there is less to share than ranks. MindSpore leaves the sum of nothing uninitialised.
    """
    platform = get_platform()
    if 0 not in platform.shape(x):
        return parameter
    shape = platform.shape(parameter)
    return platform.linear_map(parameter, lambda p: p, lambda grad: platform.zeros(shape, grad))


def is_plain_cut(spec: ShardSpec) -> bool:
    """Whether a cut dim lies over the ranks as ``Shard`` says: one ``torch.chunk`` piece each."""
    if spec.dim is None:
        return False
    return spec.ranges == ShardSpec.chunk(spec.shape, spec.dim, spec.num_ranks).ranges


def _deliver_features(rule: Rule, y: Tensor, features: int, where: str) -> Any:
    """Bring the own output features to where the rule wants them."""
    shape = get_platform().shape(y)
    check_dim(rule.output, shape, where, "output")
    if rule.use_local and rule.output in (_LAST, Shard(len(shape) - 1)):
        return y
    if rule.mesh.size() > 1 and not is_plain_cut(rule.cuts[getattr(rule, "weight", "weight")]):
        raise ValueError(
            f"{where}: found {rule.output!r} for an output of shape {shape}, whose features are made of heads or fused "
            "parts; expected Shard(-1): these lie over the ranks as no placement can say"
        )
    layout = Layout(rule.mesh, [_LAST], (*shape[:-1], features))
    return deliver(y, layout, rule.output, rule.use_local, where)


def _deliver_sum(rule: Rule, y: Tensor, bias: Tensor | None, where: str, plain: bool) -> Any:
    """Sum the ranks' terms, add the bias once, bring the result to where the rule wants it. Terms of a ``plain`` input
    that are about to be cut are first compared, as a sequence that is cut already would be a part for the whole.
    """
    if rule.use_local and isinstance(rule.output, Replicate):
        y = ReduceFromTPRegion(rule.group, checked=True)(y)
        return y if bias is None else y + beside(bias, y)
    shape: Sequence[int] = get_platform().shape(y)
    if plain and isinstance(rule.output, Shard):
        ensure_even(y, None, rule.group, where)
    layout = Layout(rule.mesh, [Partial()], shape)
    y = deliver(y, layout, rule.output, use_local=True, where=where)
    target = layout.replace([rule.output])
    if bias is not None:
        placement = target.placements[0]
        if isinstance(placement, Shard):
            last = placement.dim == len(shape) - 1
            bias = scatter_to_tp_region(bias, rule.group) if last else copy_to_tp_region(bias, rule.group)
        y = y + beside(bias, y)
    return deliver(y, target, rule.output, rule.use_local, where)
