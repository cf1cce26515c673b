"""Wrong calls of the loss, by name, and how a rank makes one."""

from __future__ import annotations

import numpy as np

from tests.conformance.adapters import this_adapter
from tests.conformance.bad_arguments import ARGUMENTS
from tests.conformance.bad_calls import BadCall, Call
from tests.conformance.bad_ranks import DISAGREEMENTS, TWO_DIMS
from tests.conformance.loss_calls import mesh_of
from tests.harness import this_rank, this_world_size

__all__ = ["BAD_CALLS", "run_bad_call"]

BAD_CALLS: dict[str, BadCall] = {
    **ARGUMENTS,
    **{f"ranks disagree: {name}": bad for name, bad in DISAGREEMENTS.items()},
    **{f"two dims: {name}": bad for name, bad in TWO_DIMS.items()},
}


def run_bad_call(name: str) -> None:
    """In a worker: make the call."""
    from hyper_parallel import Replicate, Shard, distribute_tensor
    from hyper_parallel.loss_parallel import loss_parallel

    bad, adapter = BAD_CALLS[name], this_adapter()
    size, rank = this_world_size(), this_rank()
    shape = bad.mesh or (size,)
    call = Call(adapter, rank, rank == size - 1, mesh_of(shape, ("dp", "tp")[-len(shape) :]))
    if len(shape) == 2:
        call.shards = (0, 1)
    bad.change(call)
    rng = np.random.default_rng(0)
    whole = adapter.tensor(rng.standard_normal(call.shape), call.dtype)
    lie = [Replicate() if s is None else Shard(s) for s in call.shards]
    logits = distribute_tensor(whole, call.mesh, lie)
    target = call.integers(call.labels) if call.target is None else call.target
    with loss_parallel(**call.context):
        adapter.cross_entropy(call.entry, logits, target, **call.options)
