"""Layers that several ranks share, for models written with them. Existing models: see :mod:`.plan`.

Weights are the framework's ordinary parameters that hold this rank's part. Initial values are those of the
framework's single-device layers (distribution and bounds of the whole weight), drawn from the default
generator's next number: ranks that are seeded alike draw parts of one whole, and the same one whatever
their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import get_module_backend
from hyper_parallel.tensor_parallel.groups import resolve_mesh
from hyper_parallel.tensor_parallel.initialize import Initializer, Uniform, draw_shard
from hyper_parallel.tensor_parallel.rules import ColumnRule, RowRule, Rule
from hyper_parallel.tensor_parallel.shard_loader import ParallelRule, rule_spec

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "SharedLayer",
    "linear_cuts",
    "linear_initializers",
]

_base: Any = get_module_backend().module_base


class SharedLayer(_base):  # type: ignore[misc]
    """A module with parameters that are cut as its rule says, and whose forward is the rule."""

    def _share(
        self,
        rule: Rule,
        initializers: dict[str, Initializer],
        dtype: Any,
        device: Any,
        existing: Mapping[str, Any] | None = None,
    ) -> None:
        backend = get_module_backend()
        for name, spec in rule.cuts.items():
            shape = spec.local_shape(rule.group.rank)
            parameter = (existing or {}).get(name)
            if parameter is None:
                parameter = backend.new_parameter(shape, dtype, device)
            setattr(self, name, parameter)
        backend.add_rule(self, rule)
        self._initializers = initializers
        self.reset_parameters()

    @property
    def rule(self) -> Rule:
        """The settings of this layer."""
        found = get_module_backend().rules(self)[0]
        assert isinstance(found, Rule)  # put there by the constructor
        return found

    @property
    def group(self) -> Group:
        """The ranks that share the layer."""
        return self.rule.group

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the initial values: this rank's part of a whole that does not depend on the number of ranks.

        Args:
            seed: 0 or more; None: the next number of the default generator.
        """
        seed = get_platform().draw_seed() if seed is None else seed
        backend = get_module_backend()
        for name, initializer in self._initializers.items():
            parameter, spec = getattr(self, name), self.rule.cuts[name]
            if not backend.has_memory(parameter):
                continue
            values = draw_shard(name, spec, self.group.rank, initializer, seed)
            self._adjust(name, values)
            backend.fill_parameter(parameter, values)

    def extra_repr(self) -> str:
        """What PyTorch prints of the layer."""
        shapes = ", ".join(f"{name} {spec.shape}" for name, spec in self.rule.cuts.items())
        return f"{shapes}, rank {self.group.rank} of {self.group.size}"

    def _adjust(self, name: str, values: Any) -> None:
        """Change drawn values that have to be something else."""


class ColumnParallelLinear(SharedLayer):
    """``y_k = x W_k^T + b_k``: rank k holds rows ``W_k`` of the weight ``[out, in]`` and computes its
    output features.

    Placements: x R -> y S(-1). Forward: no collective. Backward: weight and bias gradients are local, the
    gradient of x is all-reduced (while the weight's is computed). (Megatron-LM, arXiv 1909.08053.)

    Args:
        in_features: input width.
        out_features: output width of all ranks together; need not be divisible.
        bias: whether to add one; it is sharded like the output.
        group: the ranks: ``mesh["tp"]``, a :class:`Group` or the framework's process group.
        gather_output: all-gather the output features on every rank.
        sequence_parallel: the input is sharded over ``sequence_dim`` and is all-gathered (backward:
            reduce-scatter).
        sequence_dim: the dim of a sequence-parallel input that is sharded.
        overlap: all-reduce the gradient of x while the weight's is computed. Without it, second
            derivatives work.
        dtype, device: of the parameters.

    Called with ``x [..., in]``, plain or a DTensor; gives ``[..., own features]``, or all of them when
    gathered. With an uneven sequence, ``sequence_length=`` says how long the sequence is on all ranks
    together. A plain sequence without it has to be as long on every rank. On CPU the ranks ask each other
    first, by an all-gather of 16 bytes, and raise a ValueError on all; on accelerators it is not looked at.

    Example:
        >>> up = ColumnParallelLinear(512, 2048, group=mesh["tp"])                      # doctest: +SKIP
        >>> down = RowParallelLinear(2048, 512, group=mesh["tp"])                       # doctest: +SKIP
        >>> y = down(gelu(up(x)))         # one all-reduce forward, one backward         # doctest: +SKIP
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        overlap: bool = True,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = in_features, out_features, None
        mesh = resolve_mesh(group)
        rule = ColumnRule(
            mesh=mesh,
            cuts=linear_cuts("column", (out_features, in_features), bias, mesh),
            input=Shard(sequence_dim) if sequence_parallel else Replicate(),
            output=Replicate() if gather_output else Shard(-1),
            use_local=True,
            out_features=out_features,
            overlap=overlap,
        )
        self._share(rule, linear_initializers(in_features, bias), dtype, device)


class RowParallelLinear(SharedLayer):
    """``y = sum_k x_k W_k^T + b``: rank k holds columns ``W_k`` of the weight ``[out, in]``; the bias is
    whole on all.

    Placements: x S(-1) -> y R. Forward: one all-reduce; the bias is added once, after it. Backward: no
        collective.

    Args:
        in_features: input width of all ranks together; need not be divisible.
        out_features: output width.
        bias: whether to add one.
        group: the ranks: ``mesh["tp"]``, a :class:`Group` or the framework's process group.
        input_is_parallel: x holds this rank's input features, as ColumnParallelLinear gives them; False: x
            is whole on every rank and is cut here.
        sequence_parallel: reduce-scatter the output over ``sequence_dim`` instead (backward: all-gather).
        sequence_dim: the dim to shard then.
        dtype, device: of the parameters.

    Called with ``x [..., own features]``, plain or a DTensor; gives ``[..., out]``. With
    ``sequence_parallel`` all ranks have to hold the whole sequence of a plain x: on CPU they ask each other
    first, by an all-gather of 16 bytes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = in_features, out_features, None
        mesh = resolve_mesh(group)
        rule = RowRule(
            mesh=mesh,
            cuts=linear_cuts("row", (out_features, in_features), bias, mesh),
            input=Shard(-1) if input_is_parallel else Replicate(),
            output=Shard(sequence_dim) if sequence_parallel else Replicate(),
            in_features=in_features,
        )
        self._share(rule, linear_initializers(in_features, bias), dtype, device)


def linear_cuts(kind: str, shape: tuple[int, int], bias: bool, mesh: DeviceMesh) -> dict[str, ShardSpec]:
    """Of weight and bias."""
    cuts = {"weight": rule_spec(ParallelRule(kind), ".weight", shape, mesh.size())}
    if bias:
        cuts["bias"] = rule_spec(ParallelRule(kind), ".bias", shape[:1], mesh.size())
    return cuts


def linear_initializers(in_features: int, bias: bool) -> dict[str, Initializer]:
    """Those of PyTorch's Linear: uniform in ``1 / sqrt(in_features)``."""
    uniform = Uniform(1 / math.sqrt(in_features) if in_features else 0.0)
    return {"weight": uniform, "bias": uniform} if bias else {"weight": uniform}
