"""What a worker owes each framework: join the group, surface late errors, clean up after an exception."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod


class Backend(ABC):
    """The framework of one worker."""

    @abstractmethod
    def join(self) -> None:
        """Join the process group described by the environment; returns when all ranks are there."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for work in flight, so that its errors belong to the call that started it."""

    @abstractmethod
    def recover(self) -> None:
        """Undo what an exception leaves behind in the framework."""

    @abstractmethod
    def sum_over_ranks(self, value: float) -> float:
        """All-reduce one number over the whole group."""


class TorchBackend(Backend):
    """PyTorch on gloo."""

    def join(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Rank 0 inherits the listening socket from the parent, so nobody can take the port in between.
        listener = os.environ.pop("HARNESS_LISTENER", None)
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=rank == 0,
            master_listen_fd=None if listener is None else int(listener),
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def settle(self) -> None:
        """Nothing: CPU work is done when its call returns."""

    def recover(self) -> None:
        """Nothing: exceptions leave nothing behind."""

    def sum_over_ranks(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        total = torch.tensor([value])
        dist.all_reduce(total)
        return float(total)


class MindSporeBackend(Backend):
    """MindSpore on CPU, PyNative mode."""

    def join(self) -> None:
        import mindspore
        from mindspore import communication

        mindspore.set_device("CPU")
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        communication.init()

    def settle(self) -> None:
        import mindspore

        mindspore.runtime.synchronize()

    def recover(self) -> None:
        # An exception under value_and_grad leaves the executor recording; indexing then fails in later tests.
        from mindspore.common.api import _pynative_executor

        _pynative_executor.clear_res()
        _pynative_executor.set_grad_flag(False)

    def sum_over_ranks(self, value: float) -> float:
        import mindspore
        from mindspore import Tensor, ops

        return float(ops.AllReduce("sum")(Tensor([value], mindspore.float32)).asnumpy()[0])


class NoBackend(Backend):
    """No framework and no process group: what the harness does by itself is tried on this, quickly."""

    def join(self) -> None:
        """Nothing to join."""

    def settle(self) -> None:
        """Nothing is in flight."""

    def recover(self) -> None:
        """Nothing is left behind."""

    def sum_over_ranks(self, value: float) -> float:
        return value * int(os.environ["WORLD_SIZE"])


_BACKENDS: dict[str, type[Backend]] = {
    "torch": TorchBackend,
    "mindspore": MindSporeBackend,
    "none": NoBackend,
}


def make_backend(platform: str) -> Backend:
    """The backend of `platform`."""
    return _BACKENDS[platform]()


def all_ranks_meet() -> bool:
    """In a worker: whether a collective over the whole group still adds up."""
    size = int(os.environ["WORLD_SIZE"])
    return make_backend(os.environ["HYPER_PARALLEL_PLATFORM"]).sum_over_ranks(1.0) == size
