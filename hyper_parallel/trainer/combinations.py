"""Which options go together. Decided from the options alone, so before any worker starts, and on all ranks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.platform.training import absent_settings

if TYPE_CHECKING:
    from hyper_parallel.trainer.options import TrainOptions

__all__ = ["check_combination", "check_model"]

_DEVICES = {"torch": ("cpu", "cuda"), "mindspore": ("cpu", "npu")}


def check_combination(options: TrainOptions) -> None:
    """Refuse what cannot be, and what nobody has tried (docs/guide/combinations.md lists what is tested).

    Raises:
        ValueError: naming the options, with what to choose instead.
    """
    _check_backend(options)
    _check_parallelism(options)
    parts = options.parallelism.data_parallel_degree * options.training.gradient_accumulation
    if options.training.batch_size % parts:
        raise ValueError(
            f"batch_size ({options.training.batch_size}) must be a multiple of data_parallel_degree "
            f"({options.parallelism.data_parallel_degree}) * gradient_accumulation "
            f"({options.training.gradient_accumulation}) = {parts}"
        )


def check_model(options: TrainOptions) -> None:
    """Refuse what the Llama of ``options.model`` cannot be, shared as the options say. Not for models of your own.

    Raises:
        ValueError: naming the options, with what was expected.
    """
    model, ranks = options.model, options.parallelism.tensor_parallel_degree
    if options.training.sequence_length > model.max_position_embeddings:
        raise ValueError(
            f"sequence_length ({options.training.sequence_length}) must be at most model.max_position_embeddings "
            f"({model.max_position_embeddings})"
        )
    if options.plan != "auto":
        return
    if model.num_attention_heads % ranks:
        raise ValueError(
            f"model.num_attention_heads ({model.num_attention_heads}) must be a multiple of tensor_parallel_degree "
            f"({ranks}), or plan be 'last_layer'"
        )
    if model.num_key_value_heads % ranks and ranks % model.num_key_value_heads:
        raise ValueError(
            f"one of model.num_key_value_heads ({model.num_key_value_heads}) and tensor_parallel_degree ({ranks}) must "
            "be a multiple of the other, or plan be 'last_layer'"
        )


def _check_backend(options: TrainOptions) -> None:
    training, parallelism = options.training, options.parallelism
    devices = _DEVICES[options.backend]
    if options.device not in devices:
        raise ValueError(f"device {options.device!r}: not there on {options.backend}; use {' or '.join(devices)}")
    asked = {
        "data_parallel": (parallelism.data_parallel, "parallelism.data_parallel"),
        "compute_dtype": (training.mixed_precision_param, "training.mixed_precision_param"),
        "compile": (training.compile, "training.compile"),
    }
    absent = absent_settings(options.backend, {name: value for name, (value, _) in asked.items()})
    if absent:
        found = ", ".join(f"{asked[name][1]}={asked[name][0]!r}" for name in absent)
        there = ", ".join(f"{asked[name][1]}={value!r}" for name, value in absent.items())
        raise ValueError(f"{found}: not there on {options.backend}; use {there}, or backend 'torch'")


def _check_parallelism(options: TrainOptions) -> None:
    training, parallelism = options.training, options.parallelism
    if parallelism.enable_sequence_parallel and options.plan != "auto":
        raise ValueError(f"enable_sequence_parallel goes with plan 'auto', found {options.plan!r}")
    if training.loss == "linear" and parallelism.disable_loss_parallel and parallelism.tp_enabled:
        raise ValueError(
            "training.loss 'linear' shares the classes between the ranks; without disable_loss_parallel it can, "
            "or use the loss 'cross_entropy'"
        )
