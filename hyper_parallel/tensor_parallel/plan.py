"""parallelize_module: find the modules that a plan names, check all of them, then share them between the
ranks.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.core.state import current_state
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.tensor_parallel.agreement import raise_together
from hyper_parallel.tensor_parallel.auto_plan import auto_plan
from hyper_parallel.tensor_parallel.groups import tensor_parallel_mesh
from hyper_parallel.tensor_parallel.planning import Planned, plan_model
from hyper_parallel.tensor_parallel.refused_saves import refuse_save_pretrained
from hyper_parallel.tensor_parallel.replicas import make_replica_sum
from hyper_parallel.tensor_parallel.report import PlanReport
from hyper_parallel.tensor_parallel.rules import ColumnRule, Rule
from hyper_parallel.tensor_parallel.styles import ParallelStyle
from hyper_parallel.tensor_parallel.watch import watch

__all__ = ["parallelize_module", "sharding_report"]

_REPORT = "_tensor_parallel_report"


def parallelize_module(
    module: Module,
    device_mesh: Any,
    parallelize_plan: str | ParallelStyle | Mapping[str, str | ParallelStyle] = "auto",
    *,
    config: ParallelismConfig | None = None,
    sequence_parallel: bool = False,
    head: str | ParallelStyle | None = None,
) -> Module:
    """Share a model's layers between the ranks of a mesh. The model's code stays as it is; works on models
    without memory.

    Each named module keeps its class, name and parameters; the parameters become this rank's part (plain
    tensors that carry ``_shard_spec`` and ``_shard_group``), and a rule runs in the place of its forward.
    Heads, fused projections and tied weights are recognised: an embedding and a last layer that share a
    weight share its part.

    Dropout of activations that every rank holds must be the same on all: seed the ranks of a group alike.

    ``save_pretrained`` of a shared model of transformers is an error from then on, as it would write one rank's
    parts; :func:`save_hf_checkpoint` writes whole tensors.

    Args:
        module: the model; all ranks of a group pass the same one.
        device_mesh: 1-D, or with a dim named ``"tp"``; ours or the framework's.
        parallelize_plan: ``"auto"``; or a mapping of name patterns to styles (or to their names, see
            :func:`style_kinds`), where ``*`` stands for one part of a name; or one style for the module
            itself. The names may leave out a base model's prefix.
        config: for ``"auto"``: with ``disable_loss_parallel`` the last layer gives whole logits, else
            class-sharded DTensors. Default: that of the surrounding train context.
        sequence_parallel: for ``"auto"``: shard the activations between the shared layers over the sequence
            (dim 1), as DTensors.
        head: for ``"auto"``: the style of the last layer; ``"linear_loss"``: its logits are never there as a
            whole, see :class:`LinearLossParallel`. Without effect under ``disable_loss_parallel``.

    Returns:
        ``module``, changed in place. :func:`sharding_report` tells what was done.

    Raises:
        ParallelPlanError: on every rank, before anything is changed: a pattern that names nothing, modules
            that do not fit their style, heads that do not fit the ranks, some of the layers that a block works on
            together (gate and up; query, key and value) without the others, ranks with different models.

    Warns when the ranks' copies differ in the first row of some parameter: built without a common seed, they make up
    no model together, unless weights are loaded or drawn afterwards. Warns of
    ``SequenceParallel`` and its like on modules whose activations nothing in the plan cuts.

    Collectives: one small all-gather.

    Example:
        >>> parallelize_module(model, mesh["tp"])                                            # doctest: +SKIP
        >>> parallelize_module(model, mesh["tp"], {"layers.*.mlp.up_proj": "colwise",
        ...                                        "layers.*.mlp.down_proj": "rowwise"})     # doctest: +SKIP
    """
    mesh = tensor_parallel_mesh(device_mesh)
    group = mesh.get_group()
    planned: Planned | None = None
    error: Exception | None = None
    try:
        if not get_module_backend().is_module(module):
            raise TypeError(f"parallelize_module takes a module, found {type(module).__name__}")
        mapping = _as_mapping(module, parallelize_plan, config, sequence_parallel, head)
        planned = plan_model(module, mesh, mapping, automatic=parallelize_plan == "auto")
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    checksum = _checksum(module) if planned else 0
    alike = raise_together(error, planned.report.shared_view if planned else "", group, _like(module), checksum)
    assert planned is not None
    if not alike:
        warnings.warn(
            "the ranks hold different values of the model that is given to parallelize_module: the parts that they "
            "keep make up none of these models. Load a checkpoint or call materialize() afterwards, or seed all ranks "
            "alike before building",
            stacklevel=2,
        )
    if planned.doubtful:
        warnings.warn(
            f"the plan sums the gradients of {', '.join(planned.doubtful)} over the ranks, and nothing in it cuts "
            "their activations; expected that each rank has a part of these. Where they are whole, the gradients "
            f"become {group.size} times too large: leave these modules out of the plan, or let it cut their input "
            "(layouts Shard(1) of the layers around them)",
            stacklevel=2,
        )
    _apply(planned, group)
    if group.size > 1:
        cut = (b.module for b in planned.bound if any(s.dim is not None for s in b.rule.cuts.values()))
        refuse_save_pretrained(module, cut, group.size)
    setattr(module, _REPORT, planned.report)
    return module


def sharding_report(module: Module) -> PlanReport:
    """What :func:`parallelize_module` did to a model: rule -> modules -> local shapes -> bytes a rank, and
    what is whole.

    Raises:
        ValueError: the model was not parallelised.
    """
    report = getattr(module, _REPORT, None)
    if not isinstance(report, PlanReport):
        raise ValueError(f"{type(module).__name__} was not given to parallelize_module")
    return report


def _as_mapping(
    module: Module,
    plan: str | ParallelStyle | Mapping[str, str | ParallelStyle],
    config: ParallelismConfig | None,
    sequence_parallel: bool,
    head: str | ParallelStyle | None,
) -> Mapping[str, str | ParallelStyle]:
    if plan == "auto":
        settings = config or current_state().config
        return auto_plan(module, settings, sequence_parallel=sequence_parallel, head=head)
    if sequence_parallel:
        raise ParallelPlanError("sequence_parallel goes with the plan 'auto'; other plans say it in their layouts")
    if head is not None:
        raise ParallelPlanError("head goes with the plan 'auto'; other plans name the last layer")
    if isinstance(plan, ParallelStyle):
        return {"": plan}
    if isinstance(plan, Mapping):
        return plan
    raise ParallelPlanError(f"expected 'auto', a style, or a mapping of name patterns to styles, found {plan!r}")


def _like(module: Module) -> Any:
    """A parameter with memory, on the device that the ranks communicate from."""
    backend = get_module_backend()
    if not backend.is_module(module):
        return None
    parameters = (p for _, m in backend.named_modules(module) for p in backend.own_parameters(m).values())
    return next((p for p in parameters if backend.has_memory(p)), None)


def _checksum(module: Module) -> int:
    """Of a sample of the values: the first row of each parameter that has any."""
    backend, platform = get_module_backend(), get_platform()
    checksum = 0
    for _, part in backend.named_modules(module):
        for parameter in backend.own_parameters(part).values():
            shape = platform.shape(parameter)
            if backend.has_memory(parameter) and 0 not in shape:
                sample = platform.narrow(parameter, 0, 0, 1) if shape else parameter
                checksum = zlib.crc32(np.ascontiguousarray(platform.to_numpy(sample)).tobytes(), checksum)
    return checksum


def _apply(planned: Planned, group: Group) -> None:
    backend = get_module_backend()
    done: set[int] = set()
    for bound in planned.bound:
        for name, parameter in backend.own_parameters(bound.module).items():
            spec = bound.rule.cuts.get(name)
            if spec is not None and id(parameter) not in done:
                done.add(id(parameter))
                backend.cut_parameter(parameter, spec, group.rank)
        backend.add_rule(bound.module, _with_replica_sums(bound.rule, group), bound.name)
    for module, rule in planned.watched:
        watch(module, rule)
    for module, attributes in planned.attributes:
        for name, value in attributes.items():
            setattr(module, name, value)


def _with_replica_sums(rule: Rule, group: Group) -> Rule:
    if not isinstance(rule, ColumnRule):
        return rule
    sums = {name: make_replica_sum(spec, group) for name, spec in rule.cuts.items()}
    return replace(rule, replicas={name: s for name, s in sums.items() if s is not None})
