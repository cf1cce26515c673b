"""What can be set of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.platform import default_backend
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.options import TrainingOptions, TrainOptions, ValidationOptions
from hyper_parallel.trainer.output_folder import settle_output

__all__ = ["EvalOptions"]

_BATCHES = 100
"""Of a text that nobody has named: a look that takes seconds."""


@dataclass(frozen=True)
class EvalOptions:
    """Find the loss of a model on text."""

    weights: Path | None = None
    """A Hugging Face folder of a Llama (config.json, safetensors); or a checkpoint of training, or the folder of a
    run, whose last checkpoint is taken."""

    data: Path | None = None
    """A file or a folder of text or of JSON lines; None: what the run was validated on, else what it was trained on;
    for a Hugging Face folder the source of Python's standard library."""

    output: Path = Path("outputs/eval_{backend}")
    """Where ``eval.json`` and logs are written. ``{backend}`` stands for the name of the framework."""

    nproc: int = 1
    """Local worker processes to start. Ignored under torchrun and its like, which have started them."""

    backend: Literal["torch", "mindspore"] = field(default_factory=default_backend)
    """The framework; by default the one that is installed, of both PyTorch."""

    device: Literal["cpu", "cuda", "npu"] = "cpu"
    """Where the tensors live: ``cpu``, with PyTorch ``cuda``, with MindSpore ``npu`` (Ascend)."""

    batch_size: int = 8
    """Windows of text at a time, over all data-parallel ranks."""

    sequence_length: int = 128
    """Tokens of a window. What is left at the end of the text is not looked at."""

    batches: int | None = None
    """How many batches to look at, from the text's beginning; 0: all; None: all of the text that ``data`` names, 100 of
    another."""

    loss: Literal["cross_entropy", "chunked", "linear"] = "cross_entropy"
    """As in training."""

    plan: Literal["auto", "last_layer"] = "auto"
    """What tensor-parallel ranks share: all layers, or the last one alone."""

    text: TextOptions = field(default_factory=TextOptions)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"nproc must be at least 1, found {self.nproc}")
        if self.batches is not None and self.batches < 0:
            raise ValueError(f"batches must be at least 0, found {self.batches}")
        if self.batch_size % self.parallelism.data_parallel_degree:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of data_parallel_degree "
                f"({self.parallelism.data_parallel_degree})"
            )
        if self.parallelism.data_parallel != "replicate":
            raise ValueError(
                f"evaluation has no gradients to sum; expected data_parallel 'replicate', "
                f"found {self.parallelism.data_parallel!r}"
            )
        settle_output(self)
        self.as_training(LlamaConfig(), self.text)

    @property
    def max_batches(self) -> int:
        """How many batches to look at; 0: all."""
        if self.batches is None:
            return 0 if self.data is not None else _BATCHES
        return self.batches

    def as_training(
        self,
        model: LlamaConfig,
        text: TextOptions,
        data: Path | None = None,
        validation: ValidationOptions | None = None,
    ) -> TrainOptions:
        """The options of a job with this model and text; where these options name no text, on ``data``."""
        return TrainOptions(
            data=data if self.data is None else self.data,
            output=self.output,
            nproc=self.nproc,
            backend=self.backend,
            device=self.device,
            text=text,
            model=model,
            training=TrainingOptions(
                batch_size=self.batch_size, sequence_length=self.sequence_length, loss=self.loss
            ),
            validation=validation or ValidationOptions(),
            plan=self.plan,
            parallelism=self.parallelism,
        )
