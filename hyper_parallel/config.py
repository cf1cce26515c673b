"""Configuration: plain dataclasses, a docstring under each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ParallelismConfig"]


@dataclass(frozen=True)
class ParallelismConfig:
    """How a job is parallelised. Field names follow TorchTitan's ``ParallelismConfig`` where it has them.

    Raises:
        ValueError: a degree below 1; an unknown kind of data parallelism.

    Example:
        >>> from hyper_parallel import ParallelismConfig
        >>> ParallelismConfig(tensor_parallel_degree=2).loss_parallel_enabled
        True
    """

    data_parallel_degree: int = 1
    """Ranks that hold different tokens."""

    tensor_parallel_degree: int = 1
    """Ranks that share each layer; with loss parallel they also share the classes."""

    data_parallel: Literal["replicate", "ddp", "fsdp"] = "replicate"
    """How data-parallel ranks keep one model: whole copies, gradients summed by one all-reduce after backward;
    PyTorch's DistributedDataParallel, which sums during backward; its FSDP2, which also shards parameters and
    states."""

    enable_sequence_parallel: bool = False
    """Shard what lies between the shared layers over the sequence. Without tensor parallelism nothing is shared."""

    disable_loss_parallel: bool = False
    """True: the last layer gives replicated full logits and ``loss_parallel()`` does nothing."""

    loss_parallel_strict_mesh: bool = True
    """Root of ``strict``: what ``loss_parallel(strict=None)`` uses. An explicit argument wins inside its context."""

    loss_parallel_fallback_on_layout_error: bool = False
    """True: class-sharded logits outside the context, or with an illegal layout, are gathered, with one warning."""

    def __post_init__(self) -> None:
        for name in ("data_parallel_degree", "tensor_parallel_degree"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, found {value!r}")
        if self.data_parallel not in ("replicate", "ddp", "fsdp"):
            raise ValueError(f"data_parallel must be 'replicate', 'ddp' or 'fsdp', found {self.data_parallel!r}")

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are shared between ranks."""
        return self.tensor_parallel_degree > 1

    @property
    def loss_parallel_enabled(self) -> bool:
        """The one place where ``tp_enabled and not disable_loss_parallel`` is decided."""
        return self.tp_enabled and not self.disable_loss_parallel
