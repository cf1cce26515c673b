"""What can be set of a training job: plain dataclasses, a docstring under each field."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.platform import default_backend
from hyper_parallel.trainer.checkpoint_options import CheckpointOptions
from hyper_parallel.trainer.combinations import check_combination
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.metrics_options import MetricsOptions
from hyper_parallel.trainer.output_folder import settle_output

__all__ = ["OptimizerOptions", "TrainOptions", "TrainingOptions", "ValidationOptions"]


@dataclass(frozen=True)
class TrainingOptions:
    """What a step is made of."""

    batch_size: int = 8
    """Windows of text per step, over all data-parallel ranks and accumulated parts."""

    sequence_length: int = 128
    """Tokens of a window."""

    gradient_accumulation: int = 1
    """Parts that a rank's share of a batch is worked off in, one after another."""

    max_grad_norm: float | None = 1.0
    """Gradients with a larger norm (over all parameters and ranks) are scaled down to it; None: never."""

    log_interval: int = 20
    """Steps between two lines of the report."""

    loss: Literal["cross_entropy", "chunked", "linear"] = "cross_entropy"
    """Cross-entropy of the logits; or the last layer and its loss for one part of the sequence after another, so that
    the logits never exist at once; or both fused, so that they never exist."""

    loss_chunks: int = 8
    """Parts of the sequence, with ``loss`` ``chunked``."""

    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in. With ``bfloat16`` the optimizer keeps, and gradients add up in, float32."""

    activation_checkpoint: Literal["none", "full"] = "none"
    """``full``: keep only the input of each layer, and compute the rest again in backward."""

    compile: bool = False
    """Compile each layer with ``torch.compile``."""

    compile_backend: str = "inductor"
    """The compiler."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "gradient_accumulation", "log_interval", "loss_chunks"):
            _at_least(name, getattr(self, name), 1)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or None, found {self.max_grad_norm}")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with warm-up and cosine decay."""

    lr: float = 1e-3
    """Highest learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two running moments."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decay of matrices; vectors have none."""

    warmup_steps: int = 20
    """Steps until ``lr`` is reached."""

    final_lr_ratio: float = 0.1
    """Learning rate of the last step, as a part of ``lr``."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, found {self.lr}")
        _at_least("eps", self.eps, 0)
        _at_least("weight_decay", self.weight_decay, 0)
        _at_least("warmup_steps", self.warmup_steps, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), found {self.betas}")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ValueError(f"final_lr_ratio must lie in [0, 1], found {self.final_lr_ratio}")


@dataclass(frozen=True)
class ValidationOptions:
    """A look at text that is not trained on."""

    freq: int = 0
    """Steps between two validations; 0: none."""

    data: Path | None = None
    """A file or a folder of text; None: the end of the training text is held out."""

    held_out: float = 0.05
    """How much of the training text that is, as a part of it."""

    steps: int = 0
    """Batches of a validation, of the size of those in training; 0: all of the text."""

    def __post_init__(self) -> None:
        _at_least("freq", self.freq, 0)
        _at_least("validation steps", self.steps, 0)
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1, found {self.held_out}")


@dataclass(frozen=True)
class TrainOptions:
    """Train a Llama on text, with the last layer and its loss shared between ranks."""

    data: Path | None = None
    """A file or a folder of text or of JSON lines; None: the source of Python's standard library."""

    output: Path = Path("outputs/llama_bytes_{backend}")
    """Where metrics and logs are written; those of an earlier run are replaced. ``{backend}`` stands for the name of
    the framework."""

    steps: int = 400
    """Optimizer steps."""

    nproc: int = 2
    """Local worker processes to start. Ignored under torchrun and its like, which have started them."""

    backend: Literal["torch", "mindspore"] = field(default_factory=default_backend)
    """The framework; by default the one that is installed, of both PyTorch."""

    device: Literal["cpu", "cuda", "npu"] = "cpu"
    """Where the tensors live: ``cpu``, with PyTorch ``cuda``, with MindSpore ``npu`` (Ascend)."""

    seed: int = 0
    """Initial weights and the order of the text depend on it."""

    text: TextOptions = field(default_factory=TextOptions)
    model: LlamaConfig = field(default_factory=LlamaConfig)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)

    plan: Literal["auto", "last_layer"] = "auto"
    """What tensor-parallel ranks share: all layers, or the last one alone."""

    parallelism: ParallelismConfig = field(default_factory=lambda: ParallelismConfig(tensor_parallel_degree=2))

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("nproc", self.nproc, 1)
        _at_least("seed", self.seed, 0)
        if self.seed >= 1 << 63:
            raise ValueError(f"seed must be less than 2**63, found {self.seed}")
        settle_output(self)
        check_combination(self)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} must be at least {least}, found {value}")
