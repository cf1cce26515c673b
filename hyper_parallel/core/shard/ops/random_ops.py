"""Random operators: the same numbers where a tensor is replicated, others where it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial
from hyper_parallel.core.random import shard_seed
from hyper_parallel.core.shard._recipe import is_inplace
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, OpPlan
from hyper_parallel.core.shard.ops.along_dim import require_whole
from hyper_parallel.core.shard.ops.elementwise import reduced
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op
from hyper_parallel.platform import get_platform

__all__ = ["Dropout", "Multinomial", "Random"]


def seeded_run(layout: Layout) -> Callable[..., Any]:
    """Run the operator with a generator seeded for this rank's part of ``layout``."""

    def run(op_call: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
        with get_platform().seeded(shard_seed(layout, input)):
            return op_call(input, *args, **kwargs)

    return run


@register_distributed_op("random")
class Random(DistributedOp):
    """Each element drawn by itself: rand_like, normal_, bernoulli, ... The tables mark them ``random: true``."""

    signature = "input, *args, **kwargs"

    def plan(self, call: OpCall) -> OpPlan:
        if call.args.get("generator") is not None:
            raise self.refuse(call, "generator= is not supported on DTensors; seed the default generator")
        source: Layout = call.args["input"].layout
        if len(call.tensors()) > 1:
            raise self.refuse(call, "expected numbers beside the input")
        if is_inplace(call.name) and source.has_partial:
            raise self.refuse(call, "filling a Partial tensor; reduce it first")
        target = reduced(source)
        return OpPlan(target, {} if call.options.get("like") else {"input": target}, run=seeded_run(target))


@register_distributed_op("dropout")
class Dropout(DistributedOp):
    """dropout and its kin. Linear, with one mask for all terms of a Partial; draws nothing where nothing is dropped.

    Options: ``channels``: whole channels are dropped, so that only the first two dims may be sharded; ``outputs``:
    number of results, a mask among them.
    """

    signature = "input, p=0.5, training=True, inplace=False"

    def plan(self, call: OpCall) -> OpPlan:
        source: Layout = call.args["input"].layout
        linear = call.options.get("linear") and all(p == Partial() for p in source.placements if p.is_partial())
        target = source if linear else reduced(source)
        if call.options.get("channels"):
            require_whole(self, call, source, tuple(range(2, source.ndim)))
        draws = bool(call.args["training"]) and call.args["p"] > 0
        count = call.options.get("outputs", 1)
        output = target if count == 1 else [target] * count
        return OpPlan(output, {"input": target}, run=seeded_run(target) if draws else None)


@register_distributed_op("multinomial")
class Multinomial(DistributedOp):
    """Draws from rows of probabilities; the rows may be sharded, the last dim must be whole."""

    signature = "input, num_samples, replacement=False, *, generator=None"

    def plan(self, call: OpCall) -> OpPlan:
        if call.args["generator"] is not None:
            raise self.refuse(call, "generator= is not supported on DTensors; seed the default generator")
        layout = reduced(call.args["input"].layout)
        require_whole(self, call, layout, (layout.ndim - 1,))
        output = layout.replace(shape=(*layout.shape[:-1], call.args["num_samples"]))
        return OpPlan(output, {"input": layout}, run=seeded_run(layout))
