"""One rank of one program of :mod:`tools.trap_cases`; runs in a process of its own."""

from __future__ import annotations

import contextlib
import datetime
import os
from multiprocessing.connection import Connection
from typing import Any

import torch  # noqa: TID251 - the comparison is about PyTorch
import torch.distributed as dist  # noqa: TID251
import torch.distributed.tensor as dt  # noqa: TID251
from torch.distributed.device_mesh import init_device_mesh  # noqa: TID251
from torch.distributed.tensor.parallel import loss_parallel  # noqa: TID251

from tools import trap_cases
from tools.traps import OURS, OURS_NATIVE, TRAPS, Api, Outcome, Phase

__all__ = ["run_program", "run_rank"]

_GLOO_SECONDS = 120  # far longer than the parent waits, and an end for a process whose parent is gone


def run_rank(library: str, trap: int, case: int, rank: int, folder: str, pipe: Connection) -> None:
    """Send a word when the group stands, and the program's Outcome; then wait for the parent to end the process.

    So a rank that raised lives on, as it does in a job that catches the exception.
    """
    os.environ["HYPER_PARALLEL_PLATFORM"] = "torch"
    torch.set_num_threads(1)
    ranks = TRAPS[trap].cases[case].ranks
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=_GLOO_SECONDS),
    )
    pipe.send("ready")
    pipe.send(run_program(library, trap, case))
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)  # no orderly end of a group that may be out of step


def run_program(library: str, trap: int, case: int) -> Outcome:
    """What the program of ``TRAPS[trap].cases[case]`` comes to on this rank of the default group."""
    Phase.current = "forward"
    try:
        outcome: Outcome = getattr(trap_cases, TRAPS[trap].cases[case].program)(_api(library))
        return outcome
    except Exception as error:
        text = str(error).strip() or "no message"
        return Outcome("raised", type(error).__name__, text.splitlines()[0], Phase.current)


def _api(library: str) -> Api:
    if library == OURS:
        import hyper_parallel as hp

        return Api(
            hp.loss_parallel, hp.init_device_mesh, hp.distribute_tensor, hp.Shard, hp.Replicate,
            lambda mesh: hp.is_loss_parallel_active(),
        )  # fmt: skip
    context, is_on = loss_parallel, _is_torch_on
    if library == OURS_NATIVE:
        import hyper_parallel as hp

        context, is_on = hp.loss_parallel, lambda mesh: hp.is_loss_parallel_active()
    return Api(context, init_device_mesh, dt.distribute_tensor, dt.Shard, dt.Replicate, is_on)


def _is_torch_on(mesh: Any) -> bool:
    """PyTorch's rule is a table of handlers that the context fills and empties."""
    handlers: dict[Any, Any] = dt.DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._log_softmax.default in handlers
