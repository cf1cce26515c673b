"""Run a :class:`LossCase` on the ranks and compare with the oracle."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import cache
from math import prod
from typing import Any

import numpy as np

from tests.conformance.adapters import this_adapter
from tests.conformance.cases import LossCase, expected_results
from tests.conformance.oracle import assert_close
from tests.harness import run_distributed, this_rank

__all__ = ["check", "check_results", "mesh_of", "run_case"]


def check(platform: str, case: LossCase, **more: Any) -> list[dict[str, Any]]:
    """Run the case on its ranks; loss and gradient of every rank are the oracle's, in the dtypes promised."""
    results = run_distributed(run_case, case, platform=platform, world_size=prod(case.mesh), **more)
    check_results(case, results)
    return results


def check_results(case: LossCase, results: list[dict[str, Any]]) -> None:
    """Compare what the ranks gave with the oracle."""
    loss_dtype = "float64" if case.dtype == "float64" else "float32"
    weight = 1.0 if case.weight is None or not case.weight.size else float(np.abs(case.weight).max())
    scale = float(np.max(np.abs(case.upstream), initial=0.0)) * weight
    finite = case.logits[np.isfinite(case.logits)]
    tokens = case.target.size if case.effective_reduction == "sum" else 1
    loss_scale = weight * max(1.0, float(np.ptp(finite)) if finite.size else 1.0) * max(tokens, 1)
    for rank, (found, (loss, gradient)) in enumerate(zip(results, expected_results(case), strict=True)):
        where = f"rank {rank} of {case.mesh}"
        assert_close(found["loss"], loss, loss_dtype, f"loss of {where}", scale=loss_scale)
        assert_close(found["grad"], gradient, case.dtype, f"gradient of {where}", scale=scale)
        assert found["loss_dtype"] == loss_dtype, f"the loss of {where} has dtype {found['loss_dtype']}"
        assert found["grad_dtype"] == case.dtype, f"the gradient of {where} has dtype {found['grad_dtype']}"
        assert found["unchanged"], f"logits, target or weight of {where} were changed by the loss"
        assert found["kind"] == ("native" if case.entry.startswith("native") else "ours")
        if case.effective_reduction != "none":
            assert_close(found["float"], loss, loss_dtype, f"float(loss) on {where}", scale=loss_scale)
            assert np.array_equal(found["loss"], results[0]["loss"], equal_nan=True), "the loss differs between ranks"


# -- in the workers -----------------------------------------------------------------------------------------------


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The mesh over all ranks, made once."""
    from hyper_parallel import init_device_mesh

    return init_device_mesh(this_adapter().device_type, shape, mesh_dim_names=names)


def placements_of(shards: tuple[int | None, ...]) -> list[Any]:
    """Shard or Replicate for each mesh dim."""
    from hyper_parallel import Replicate, Shard

    return [Replicate() if s is None else Shard(s) for s in shards]


def local_logits(case: LossCase) -> Any:
    """This rank's logits as a plain tensor."""
    return this_adapter().tensor(case.logits[case.slices(this_rank())], case.dtype)


def logits_of(case: LossCase, local: Any) -> Any:
    """The distributed logits over a local tensor, on its graph."""
    mesh = mesh_of(case.mesh, case.mesh_names)
    return this_adapter().wrap(case.entry, local, mesh, placements_of(case.shards), case.logits.shape)


def target_of(case: LossCase) -> Any:
    """The target, as ``target_as`` says."""
    adapter, rank = this_adapter(), this_rank()
    own = case.target[case.token_slices(rank)]
    if case.target_as == "plain":
        return adapter.tensor(case.target, case.target_dtype)
    if case.target_as == "local":
        return adapter.tensor(own, case.target_dtype)
    sharded = case.target_as == "sharded"
    local = adapter.tensor(own if sharded else case.target, case.target_dtype)
    shards = case.token_shards if sharded else (None,) * len(case.mesh)
    mesh = mesh_of(case.mesh, case.mesh_names)
    return adapter.wrap(case.entry, local, mesh, placements_of(shards), case.target.shape)


def weight_of(case: LossCase) -> Any:
    """The class weights, or None."""
    if case.weight is None:
        return None
    adapter = this_adapter()
    plain = adapter.tensor(case.weight, case.weight_dtype or case.dtype)
    if case.weight_as == "plain":
        return plain
    mesh = mesh_of(case.mesh, case.mesh_names)
    return adapter.wrap(case.entry, plain, mesh, placements_of((None,) * len(case.mesh)), case.weight.shape)


def context_of(case: LossCase) -> AbstractContextManager[Any]:
    """``loss_parallel()`` and the configuration around it, as the case says."""
    from hyper_parallel import ParallelismConfig, get_train_context
    from hyper_parallel.loss_parallel import loss_parallel

    stack = ExitStack()
    if case.config:
        stack.enter_context(get_train_context(False, ParallelismConfig(**case.config))())
    if case.context is not None:
        arguments = dict(case.context)
        if isinstance(arguments.get("mesh"), str):
            arguments["mesh"] = mesh_of(case.mesh, case.mesh_names)[arguments["mesh"]]
        stack.enter_context(loss_parallel(**arguments))
    return stack


def call_loss(case: LossCase, logits: Any, target: Any, weight: Any) -> Any:
    """The loss as the user writes it."""
    options = dict(case.options)
    for name in ("ignore_index", "reduction"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    if weight is not None:
        options["weight"] = weight
    return this_adapter().cross_entropy(case.entry, logits, target, **options)


def run_case(case: LossCase) -> dict[str, Any]:
    """Loss and gradient of this rank."""
    adapter = this_adapter()
    local, target, weight = local_logits(case), target_of(case), weight_of(case)
    inputs = [local, adapter.unwrap(target)] + ([] if weight is None else [adapter.unwrap(weight)])
    before = [adapter.numpy(x) for x in inputs]
    found: dict[str, Any] = {}

    def loss_of(x: Any) -> Any:
        logits = logits_of(case, x)
        with ExitStack() if case.backward_inside else context_of(case):
            loss = call_loss(case, logits, target, weight)
        found["kind"] = adapter.kind_of(loss)
        result = adapter.unwrap(loss)
        if case.effective_reduction != "none":
            found["float"] = adapter.host_number(loss)
        return result

    with context_of(case) if case.backward_inside else ExitStack():
        done = adapter.value_and_grad(loss_of, local, case.upstream_of(this_rank()))
    after = [adapter.numpy(x) for x in inputs]
    return found | {
        "loss": done.value,
        "loss_dtype": done.value_dtype,
        "grad": done.grad,
        "grad_dtype": done.grad_dtype,
        "unchanged": all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(before, after)),
    }
