"""Options that do not go together, and different batches in a group, are one clear error."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.core.device_mesh import init_device_mesh
from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.trainer.combinations import check_model
from hyper_parallel.trainer.data import Batch
from hyper_parallel.trainer.options import OptimizerOptions, TrainingOptions, TrainOptions, ValidationOptions
from hyper_parallel.trainer.same_batch import check_same_batch
from tests.harness import RankError, run_distributed

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "sequence parallel, last layer": (
        {
            "plan": "last_layer",
            "parallelism": ParallelismConfig(tensor_parallel_degree=2, enable_sequence_parallel=True),
        },
        "goes with plan 'auto', found 'last_layer'",
    ),
    "linear without shared classes": (
        {
            "training": TrainingOptions(loss="linear"),
            "parallelism": ParallelismConfig(tensor_parallel_degree=2, disable_loss_parallel=True),
        },
        "training.loss 'linear' shares the classes",
    ),
    "batch": (
        {
            "training": TrainingOptions(batch_size=6, gradient_accumulation=2),
            "parallelism": ParallelismConfig(data_parallel_degree=2),
        },
        "batch_size (6) must be a multiple of data_parallel_degree (2) * gradient_accumulation (2) = 4",
    ),
}


@pytest.mark.contract("V2")
@pytest.mark.platform("torch")
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_go_together(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError) as raised:
        replace(TrainOptions(), **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        ({}, 3, "model.num_attention_heads (4) must be a multiple of tensor_parallel_degree (3), or plan be"),
        ({"hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 2}, 3, "model.num_key_value_heads (2)"),
        ({"max_position_embeddings": 127}, 1, "sequence_length (128) must be at most model.max_position_embeddings"),
    ],
)
def test_a_model_that_does_not_fit(sizes: dict[str, int], tp: int, message: str) -> None:
    options = TrainOptions(model=LlamaConfig(**sizes), parallelism=ParallelismConfig(tensor_parallel_degree=tp))  # type: ignore[arg-type]
    with pytest.raises(ValueError) as raised:
        check_model(options)
    assert message in str(raised.value)
    check_model(replace(options, plan="last_layer", training=TrainingOptions(sequence_length=64)))
    check_model(TrainOptions(parallelism=ParallelismConfig(tensor_parallel_degree=4)))  # two ranks to a key/value head


@pytest.mark.contract("V2")
@pytest.mark.platform("mindspore")
@pytest.mark.parametrize(
    ("training", "parallelism", "named"),
    [
        (TrainingOptions(mixed_precision_param="bfloat16", compile=True), {}, "mixed_precision_param='bfloat16', "),
        (TrainingOptions(), {"data_parallel": "fsdp"}, "use parallelism.data_parallel='replicate', or backend 'torch'"),
    ],
)
def test_mindspore_says_what_it_has_not(training: TrainingOptions, parallelism: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="not there on mindspore") as raised:
        TrainOptions(backend="mindspore", training=training, parallelism=ParallelismConfig(**parallelism))  # type: ignore[arg-type]
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelismConfig(data_parallel="zero"), "data_parallel must be 'replicate', 'ddp' or 'fsdp'"),  # type: ignore[arg-type]
        (lambda: ValidationOptions(held_out=1.5), "held_out must lie between 0 and 1, found 1.5"),
        (lambda: ValidationOptions(freq=-1), "freq must be at least 0"),
        (lambda: LlamaConfig(rms_norm_eps=-1e-5), "rms_norm_eps must be positive and finite, found -1e-05"),
        (lambda: LlamaConfig(rope_theta=0.0), "rope_theta must be positive and finite, found 0.0"),
        (lambda: OptimizerOptions(lr=math.inf), "lr must be positive and finite, found inf"),
        (lambda: OptimizerOptions(lr=math.nan), "lr must be positive and finite, found nan"),
        (lambda: TrainOptions(seed=1 << 63), "seed must be less than 2**63, found 9223372036854775808"),
        (lambda: TrainOptions(backend="torch", device="npu"), "device 'npu': not there on torch; use cpu or cuda"),
        (lambda: TrainOptions(backend="mindspore", device="cuda"), "not there on mindspore; use cpu or npu"),
        (lambda: TrainingOptions(loss_chunks=0), "loss_chunks must be at least 1"),
    ],
)
def test_values_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        make()
    assert message in str(raised.value)


def check_batches(dp: int, tp: int, contents: list[int], lengths: list[int]) -> None:
    """In a worker: each rank with a batch of its own."""
    from tests.harness.platforms import this_rank

    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    ids = np.full((2, lengths[this_rank()]), contents[this_rank()], np.int64)
    check_same_batch(Batch(ids, ids), mesh)


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_ranks_of_a_group_must_read_the_same_batch(platform: str) -> None:
    """Ranks of one tp group with different batches."""
    run_distributed(check_batches, 1, 2, [3, 3], [4, 4], platform=platform, world_size=2, timeout=60)
    with pytest.raises(RankError, match=r"ranks 0, 1 raised ValueError: the 2 ranks of a tensor-parallel group"):
        run_distributed(check_batches, 1, 2, [3, 5], [4, 4], platform=platform, world_size=2, timeout=60)


@pytest.mark.platform("torch")
def test_every_rank_hears_of_it() -> None:
    """Also those whose own group is all right: nobody waits in the next collective."""
    run_distributed(check_batches, 2, 2, [3, 3, 5, 5], [4] * 4, platform="torch", world_size=4)
    with pytest.raises(RankError, match=r"ranks 0, 1, 2, 3 raised ValueError.* data-parallel rank 1"):
        run_distributed(check_batches, 2, 2, [3, 3, 5, 6], [4] * 4, platform="torch", world_size=4)
    with pytest.raises(RankError, match="batches of different shapes"):
        run_distributed(check_batches, 2, 2, [3, 3, 5, 5], [4, 4, 8, 8], platform="torch", world_size=4)
