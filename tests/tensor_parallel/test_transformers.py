"""Unmodified transformers models, shared by a plan: loss and every gradient are those of one device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.small_models import KINDS, VOCAB, build, gradient_error, own_part, tokens, value

pytest.importorskip("transformers")
pytestmark = pytest.mark.platform("torch")
LENGTH = 9  # not divisible
TOLERANCE = 1e-5  # transformers computes the loss in fp32


def step(
    kind: str, options: dict[str, Any], plan: Any, disable_loss_parallel: bool, sequence_parallel: bool
) -> dict[str, Any]:
    from hyper_parallel import DTensor, ParallelismConfig, loss_parallel
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.torch_workers import count_collectives, tp_mesh

    reference, model = build(kind, **options), build(kind, **options)
    ids = tokens(length=LENGTH)
    expected = reference(ids, labels=ids).loss
    expected.backward()
    classes = {name: type(m).__name__ for name, m in model.named_modules()}
    plan = getattr(model, plan) if plan.startswith("_") else plan
    config = ParallelismConfig(disable_loss_parallel=disable_loss_parallel)
    shared = parallelize_module(model, tp_mesh(), plan, config=config, sequence_parallel=sequence_parallel)
    assert shared is model
    with count_collectives() as forward:
        with loss_parallel():
            out = model(ids, labels=ids)
    with count_collectives() as backward:
        out.loss.backward()
    assert all(isinstance(m, type(reference.get_submodule(name))) for name, m in model.named_modules())
    return {
        "loss": abs(value(out.loss) - float(expected)) / float(expected),
        "gradient": gradient_error(reference, model, this_rank()),
        "sharded logits": isinstance(out.logits, DTensor),
        "logits": tuple(out.logits.shape),
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "forward": forward,
        "backward": backward,
        "classes": len(classes),
    }


def check(
    kind: str,
    world_size: int,
    *,
    plan: str = "auto",
    whole_logits: bool = False,
    sequence: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    found = run_distributed(step, kind, options, plan, whole_logits, sequence, world_size=world_size, timeout=120.0)
    for result in found:
        assert result["loss"] < TOLERANCE
        assert result["gradient"][0] < TOLERANCE, result["gradient"]
        assert result["logits"] == (2, LENGTH, VOCAB)
        assert result["tied"] == options.get("tied", False)
    return found


@pytest.mark.contract("T4", "C5")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_auto_plan(kind: str, world_size: int, tied: bool) -> None:
    for result in check(kind, world_size, tied=tied):
        assert result["sharded logits"]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sequence_parallel(kind: str, world_size: int, tied: bool) -> None:
    """Attention and MLP gather once and reduce-scatter once a layer, forward and backward; no activation is summed."""
    for result in check(kind, world_size, sequence=True, tied=tied):
        assert result["sharded logits"]
        assert result["forward"].get("all_reduce", 0) == 0
        assert result["forward"]["reduce_scatter"] == 2 * 2 + 1


@pytest.mark.contract("C5", "C1")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_whole_logits_without_loss_parallel(kind: str, tied: bool) -> None:
    for result in check(kind, 2, tied=tied, whole_logits=True):
        assert not result["sharded logits"]


@pytest.mark.contract("T4")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3"])
def test_plans_of_transformers_as_they_are(kind: str) -> None:
    for result in check(kind, 2, plan="_tp_plan"):
        assert not result["sharded logits"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_one_key_value_head_on_all_ranks(kind: str) -> None:
    check(kind, 4, heads=8, key_values=1)


OTHER_KINDS = (
    "apertus",  # its activation has parameters, whose gradients are summed
    "cohere",  # attention and MLP beside each other
    "gemma2",  # a scaled embedding, capped logits
    "gpt_neox",  # queries, keys and values interleaved by heads
    "mistral",
    "olmo2",  # norms over all heads: their projections are gathered
    "phi",  # biases, also of the last layer
    "starcoder2",
)


@pytest.mark.contract("T4")
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_models(kind: str) -> None:
    check(kind, 2)


def test_biases() -> None:
    check("llama", 2, attention_bias=True, mlp_bias=True)


def test_collectives_of_a_layer() -> None:
    """Two all-reduces a layer forward (attention, MLP) and two backward, with the embedding and the head one each."""
    for result in check("llama", 2):
        forward = result["forward"]
        assert forward.get("all_reduce", 0) == 2 * 2 + 1
        assert result["backward"] == {"all_reduce": 2 * 2 + 1}


def train(kind: str, steps: int) -> tuple[list[float], list[float], float]:
    """AdamW with clipping beside one device: worst errors of losses, norms and final weights."""
    import torch

    from hyper_parallel import loss_parallel
    from hyper_parallel.tensor_parallel.grad_norm import clip_grad_norm_
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.torch_workers import tp_mesh

    reference, model = build(kind, tied=True), build(kind, tied=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, model)]
    parallelize_module(model, tp_mesh())  # after the optimizer: parameters stay the same objects
    losses, norms = [], []
    for i in range(steps):
        ids = tokens(seed=i)
        expected = reference(ids, labels=ids).loss
        expected.backward()
        with loss_parallel():
            loss = model(ids, labels=ids).loss
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        losses.append(abs(value(loss) - float(expected)))
        norms.append(abs(float(clip_grad_norm_(model.parameters(), 0.5)) / float(norm) - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst = 0.0
    for whole, own in zip(reference.parameters(), model.parameters()):
        expected = own_part(whole.detach(), own, this_rank())
        worst = max([worst, *(expected - own.detach()).abs().flatten().tolist()])
    return losses, norms, worst


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training(kind: str, world_size: int) -> None:
    for losses, norms, weights in run_distributed(train, kind, 5, world_size=world_size, timeout=120.0):
        assert max(losses) < 1e-5 and max(norms) < 1e-5 and weights < 1e-5


def checkpointing() -> tuple[float, str]:
    from hyper_parallel import loss_parallel
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.torch_workers import tp_mesh

    reference, model, ids = build("llama"), build("llama"), tokens()
    reference(ids, labels=ids).loss.backward()
    parallelize_module(model, tp_mesh())
    model.gradient_checkpointing_enable()
    model.train()
    with loss_parallel():
        model(ids, labels=ids).loss.backward()
    return gradient_error(reference, model, this_rank())


def test_gradient_checkpointing() -> None:
    for worst, where in run_distributed(checkpointing, world_size=2, timeout=60.0):
        assert worst < TOLERANCE, where


def with_data_parallel(kind: str, how: str, folder: str) -> float:
    """2 x 2 ranks: the worst error of a gradient after DDP or FSDP2 over the other mesh dim."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from hyper_parallel import clip_grad_norm_, init_device_mesh, loss_parallel
    from hyper_parallel.platform import get_platform
    from hyper_parallel.tensor_parallel.plan import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = mesh.coordinate
    reference, model, ids = build(kind, tied=True), build(kind, tied=True), tokens(batch=4)
    reference(ids, labels=ids).loss.backward()
    parallelize_module(model, mesh)
    parts = [own_part(p.grad, q, column) for p, q in zip(reference.parameters(), model.parameters())]
    if how == "ddp":
        outer = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp").handle)
    else:
        outer = fully_shard(model, mesh=get_platform().native_mesh(mesh)["dp"])
    own = ids[2 * row : 2 * row + 2]
    with loss_parallel():
        outer(own, labels=own).loss.backward()
    grads = [p.grad.full_tensor() if how == "fsdp2" else p.grad for p in model.parameters()]
    check_files(model, reference, f"{folder}/{kind}")
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), math.inf)
    assert float(clip_grad_norm_(model.parameters(), math.inf)) == pytest.approx(float(norm), rel=1e-5)
    return max(float((a - b).abs().amax() / b.abs().amax().clamp(min=1e-3)) for a, b in zip(grads, parts))


def check_files(model: Any, reference: Any, folder: str) -> None:
    """What ranks write together is the model of one device, and what they read of it again is what each had."""
    import torch
    from safetensors.torch import load_file

    from hyper_parallel import load_hf_checkpoint, save_hf_checkpoint

    before = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    names = save_hf_checkpoint(model, folder, max_shard_bytes=20000)
    stored = {key: value for name in names for key, value in load_file(f"{folder}/{name}").items()}
    expected = dict(reference.named_parameters())
    assert stored.keys() == expected.keys() and all(torch.equal(stored[n], p) for n, p in expected.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_hf_checkpoint(model, folder)
    assert all(torch.equal(getattr(p, "_local_tensor", p), b) for p, b in zip(model.parameters(), before))


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_with_data_parallel(how: str, tmp_path: Path) -> None:
    for kind in ("qwen3", "gpt2"):
        found = run_distributed(with_data_parallel, kind, how, str(tmp_path), world_size=4, timeout=120.0)
        assert max(found) < TOLERANCE


def generate(kind: str) -> tuple[list[int], list[int]]:
    from hyper_parallel import ParallelismConfig
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.torch_workers import tp_mesh

    reference, model, ids = build(kind), build(kind), tokens(batch=1)
    parallelize_module(model, tp_mesh(), config=ParallelismConfig(disable_loss_parallel=True))
    options = {"max_new_tokens": 6, "do_sample": False}
    return reference.generate(ids, **options)[0].tolist(), model.generate(ids, **options)[0].tolist()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_generation_with_a_cache(kind: str) -> None:
    for expected, found in run_distributed(generate, kind, world_size=4, timeout=60.0):
        assert found == expected


def copies() -> dict[str, Any]:
    """A deep copy, and a model moved to another dtype, keep what is known of their parameters."""
    import copy

    import torch

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.torch_workers import array, tp_mesh

    model, ids = build("llama", tied=True), tokens()
    parallelize_module(model, tp_mesh())
    twin = copy.deepcopy(model)
    before = array(model(ids).logits.full_tensor())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    same = np.array_equal(array(twin(ids).logits.full_tensor()), before)
    marked = [
        all(hasattr(p, "_shard_spec") for p in m.parameters() if p.ndim > 1)
        for m in (twin, twin.to(torch.float32), twin.to_empty(device="cpu"))
    ]
    return {"independent": same, "marked": marked, "state": list(twin.state_dict()) == list(model.state_dict())}


def test_copies() -> None:
    for result in run_distributed(copies, world_size=2, timeout=60.0):
        assert result == {"independent": True, "marked": [True] * 3, "state": True}
