"""MindSpore's process groups and the communication operators on them."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, communication, ops
from mindspore.communication import GlobalComm
from mindspore.mint.distributed import all_gather_into_tensor, all_reduce

__all__ = ["Communicator", "create_communicator", "is_initialized", "leave"]

_LEAVE_SECONDS = 3.0
"""Time in which all ranks should have come to the end of their work; no rank waits longer for the others."""

_SEND_SECONDS = 0.05
"""Time for what the network thread has yet to send."""


class Communicator:
    """One process group of MindSpore, by name, and its operators, each made once.

    This is what ``Group.handle`` holds.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.native = mindspore.get_context("device_target") != "CPU"
        """Whether the device has all operators on sub-groups. MindSpore's CPU backend has AllReduce(sum) alone."""
        self._operators: dict[tuple[Any, ...], Any] = {}

    def start_all_reduce(self, x: Any, op: str) -> Any:
        """Reduce ``x`` over the group, in its own memory and asynchronously; returns the handle to wait for."""
        return all_reduce(x, op, self.name, async_op=True)

    def start_all_gather(self, out: Any, x: Any) -> Any:
        """Gather ``x`` into ``out``, asynchronously; returns the handle to wait for."""
        return all_gather_into_tensor(out, x, self.name, async_op=True)

    def operator(self, kind: str, *arguments: Any) -> Any:
        """``mindspore.ops.<kind>(*arguments, group=name)``; making one costs more than calling it."""
        key = (kind, *arguments)
        operator = self._operators.get(key)
        if operator is None:
            operator = self._operators[key] = getattr(ops, kind)(*arguments, group=self.name)
        return operator


def is_initialized() -> bool:
    """Whether ``mindspore.communication.init`` has run."""
    return bool(GlobalComm.INITED)


def create_communicator(ranks: tuple[int, ...]) -> Communicator:
    """The group of ``ranks``, of which this process is one. Only members may call this, all of them must."""
    if ranks == tuple(range(communication.get_group_size())):
        return Communicator(GlobalComm.WORLD_COMM_GROUP)
    # the same name on all members; long lists of ranks would exceed the length that Ascend allows
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    name = f"hyper_parallel_{len(ranks)}_{digest}"
    communication.create_group(name, list(ranks))
    return Communicator(name)


def leave() -> None:
    """End the communication of this process: when the others are through with theirs, or some seconds later.

    On CPU each message of a collective is answered by the receiver's network thread, which wakes the receiver first and
    sends the answer afterwards. A process that ends in between takes the answer with it, and the sender waits for it
    for half a minute, then fails. So one more collective comes after the last that matters: whoever has its result
    knows that all others have all of theirs. Its own answers may get lost, and nobody waits for them to the end.
    """
    group = Communicator(GlobalComm.WORLD_COMM_GROUP)
    if not group.native and communication.get_group_size() > 1:
        thread = threading.Thread(target=_meet, args=(group,), daemon=True)
        thread.start()
        thread.join(_LEAVE_SECONDS)
        time.sleep(_SEND_SECONDS)
    communication.release()


def _meet(group: Communicator) -> None:
    with contextlib.suppress(RuntimeError):  # another rank has not come, and its end is for others to explain
        group.operator("AllReduce", "sum")(Tensor(np.zeros(1, np.float32))).asnumpy()
