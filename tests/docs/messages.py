"""Calls that give each message of the table in docs/guide/loss_parallel.md; they run on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MESH: Any = None


def mesh() -> Any:
    from hyper_parallel import init_device_mesh

    global MESH
    MESH = MESH or init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return MESH


def logits(dim: int = 1) -> Any:
    import torch

    from hyper_parallel import Shard, distribute_tensor

    return distribute_tensor(torch.zeros(4, 6), mesh()["tp"], [Shard(dim)])


def target() -> Any:
    import torch

    return torch.tensor([0, 1, 2, 5])


def call(x: Any = None, t: Any = None, **options: Any) -> None:
    import torch.nn.functional as F

    from hyper_parallel import loss_parallel

    with loss_parallel(options.pop("mesh", None)):
        F.cross_entropy(logits() if x is None else x, target() if t is None else t, **options)


def outside() -> None:
    import torch.nn.functional as F

    F.cross_entropy(logits(), target())


def partial() -> None:
    import torch

    from hyper_parallel import DTensor, Partial

    call(DTensor.from_local(torch.zeros(4, 6), mesh()["tp"], [Partial()]))


def wrong_mesh() -> None:
    call(mesh=mesh()["dp"])


def whole_mesh() -> None:
    call(mesh=mesh())


def short_target() -> None:
    call(t=target()[:3])


def probabilities() -> None:
    import torch

    call(t=torch.ones(4, 6))


def out_of_range() -> None:
    call(t=target() + 1)


def short_weight() -> None:
    import torch

    call(weight=torch.ones(3))


def disagreement() -> None:
    call(reduction=["mean", "sum"][mesh()["tp"].get_local_rank()])


def other_target() -> None:
    call(t=target() - mesh()["tp"].get_local_rank() * (target() == 5))


def no_rule() -> None:
    import torch

    torch.special.bessel_j0(logits())


CALLS: dict[str, Callable[[], None]] = {
    "outside loss_parallel()": outside,
    "expected Shard(1) (the class dim) on exactly one mesh dim": lambda: call(logits(0)),
    "are still to be reduced": partial,
    "expected over ranks": wrong_mesh,
    "takes the 1-D mesh": whole_mesh,
    "the target has shape": short_target,
    "class probabilities are not supported": probabilities,
    "label_smoothing=": lambda: call(label_smoothing=0.1),
    "is out of bounds": out_of_range,
    "the class weights have shape": short_weight,
    "the ranks of the mesh disagree": disagreement,
    "the target differs between ranks": other_target,
    "has no distributed rule": no_rule,
}


def run_all(calls: dict[str, Callable[[], None]] = CALLS) -> dict[str, str]:
    """The message that each call gives on this rank."""
    found = {}
    for fragment, function in calls.items():
        try:
            function()
            found[fragment] = "no error"
        except Exception as error:
            found[fragment] = str(error)
    return found
