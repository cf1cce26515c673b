"""A whole training step of the example Llama: our layers and loss, PyTorch's styles and its loss_parallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.memory import peak_extra_bytes
from benchmarks.step_model import step_model
from benchmarks.timing import Clock, interleave
from hyper_parallel import init_device_mesh, loss_parallel, parallelize_module
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.llama.torch import LlamaForCausalLM

__all__ = ["run"]

Step = Callable[[], torch.Tensor]


def run(options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a way: seconds, peak memory, the loss of the first step (the same for all)."""
    size = dist.get_world_size()
    config = step_model(options["quick"])
    tokens = torch.randint(config.vocab_size, (2, 129), generator=torch.Generator().manual_seed(3))
    rows: list[dict[str, Any]] = []
    for sequence in (False, True):
        steps = {
            "ours": _step(_ours(config, size, sequence), tokens, loss_parallel),
            "PyTorch": _step(_pytorch(config, size, sequence), tokens, _their_loss_parallel()),
        }
        losses = {name: float(step()) for name, step in steps.items()}
        peaks = {name: peak_extra_bytes(step) for name, step in steps.items()}
        times = interleave(
            {name: partial(_timed, step) for name, step in steps.items()}, 3 if options["quick"] else 7, dist.barrier
        )
        for name in steps:
            rows.append(
                {
                    "model": name,
                    "sequence parallel": "yes" if sequence else "no",
                    "step ms": round(1e3 * times[name]["seconds"], 1),
                    "times ours": round(times[name]["seconds"] / times["ours"]["seconds"], 2),
                    "peak extra MiB": round((peaks[name] or 0) / 2**20, 1),
                    "first loss": round(losses[name], 5),
                }
            )
    return rows


def _step(model: torch.nn.Module, tokens: torch.Tensor, context: Callable[[], AbstractContextManager[object]]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].reshape(-1)

    def step() -> torch.Tensor:
        with context():
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.to_local().detach()  # type: ignore[attr-defined, no-any-return, operator, unused-ignore]

    return step


def _timed(step: Step) -> dict[str, float]:
    clock = Clock()
    step()
    return {"seconds": clock.lap()}


def _model(config: LlamaConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    return model


def _ours(config: LlamaConfig, size: int, sequence: bool) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    return parallelize_module(_model(config), mesh["tp"], sequence_parallel=sequence)


def _their_loss_parallel() -> Callable[[], AbstractContextManager[object]]:
    from torch.distributed.tensor.parallel import loss_parallel as theirs

    return theirs


def _pytorch(config: LlamaConfig, size: int, sequence: bool) -> torch.nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )
    from torch.distributed.tensor.parallel import parallelize_module as their_parallelize

    mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    model = _model(config)
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan[f"{layer}.input_layernorm"] = plan[f"{layer}.post_attention_layernorm"] = SequenceParallel()
            whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan[f"{layer}.mlp"] = PrepareModuleInput(**whole)
            plan[f"{layer}.self_attn"] = PrepareModuleInput(
                input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
            )
    if sequence:
        plan["model.norm"] = SequenceParallel()
    return their_parallelize(model, mesh, plan)
