"""Unmodified transformers models, their own files: loaded sharded they compute what they compute whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import run_distributed, this_rank

pytest.importorskip("transformers")
TORCH = pytest.mark.platform("torch")


def load_transformers(kind: str, directory: str) -> dict[str, Any]:
    """Save with transformers, load sharded: weights, logits, bytes, buffers, ties."""
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint
    from tests.checkpoint import torch_models as models

    reference = models.whole(kind)
    path = Path(directory, "model")
    models.on_rank_0(lambda: reference.save_pretrained(path, max_shard_size="20KB"))
    model = models.sharded(kind)
    report = load_hf_checkpoint(model, path)
    parts = models.parts(model)
    sizes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "weights": models.all_equal(parts, models.expected_parts(reference, model)),
        "logits": np.abs(models.logits(model) - models.logits(reference)).max(),
        "buffers": all(np.array_equal(a, b) for a, b in zip(reference.buffers(), model.buffers(), strict=True)),
        "tied": model.get_input_embeddings().weight is model.lm_head.weight,
        "own bytes": report.bytes_read[this_rank()] == sizes,
        "bytes": report.bytes_read,
        "file bytes": report.file_bytes,
        "files": len(list(path.glob("*.safetensors"))),
        "open": [n for n in os.listdir("/proc/self/fd") if directory in os.path.realpath(f"/proc/self/fd/{n}")],
        "mapped": directory in Path("/proc/self/maps").read_text(),
    }


@TORCH
@pytest.mark.contract("S3", "S4")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "phi3"])
def test_models_of_transformers(kind: str, world_size: int, tmp_path: Path) -> None:
    found = run_distributed(load_transformers, kind, str(tmp_path), world_size=world_size, timeout=90)
    for result in found:
        assert result["weights"] and result["own bytes"] and result["buffers"]
        assert result["logits"] < 2e-5
        assert result["tied"] == (kind in ("llama", "gpt2"))
        assert result["files"] > 1 and not result["open"] and not result["mapped"]
        # each rank a part, all together everything once, replicas once more for each rank
        assert result["bytes"] == found[0]["bytes"]
        assert max(result["bytes"]) < result["file bytes"] * (0.75 if world_size == 2 else 0.5)
        assert sum(result["bytes"]) >= result["file bytes"]


def train_step(kind: str, directory: str) -> dict[str, float | bool]:
    """Load sharded, then loss and gradients with class-sharded logits, against the whole model."""
    import torch

    from hyper_parallel import loss_parallel
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.checkpoint import torch_models as models
    from tests.tensor_parallel.small_models import gradient_error, tokens, value
    from tests.tensor_parallel.torch_workers import tp_mesh

    reference, ids = models.whole(kind), tokens()
    models.on_rank_0(lambda: reference.save_pretrained(directory))
    expected = reference(ids, labels=ids).loss
    expected.backward()
    with torch.device("meta"):
        model = models.build(kind).eval()
    load_hf_checkpoint(parallelize_module(model, tp_mesh()), directory)
    with loss_parallel():
        loss = model(ids, labels=ids).loss
    loss.backward()
    return {
        "loss": abs(value(loss) - float(expected)) / float(expected),
        "gradient": gradient_error(reference, model, this_rank())[0],
    }


@TORCH
@pytest.mark.contract("S3", "S4", "T4")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_loss_and_gradients_after_loading(kind: str, world_size: int, tmp_path: Path) -> None:
    for result in run_distributed(train_step, kind, str(tmp_path), world_size=world_size, timeout=90):
        assert result["loss"] < 1e-6 and result["gradient"] < 1e-4


def load_without_prefix(directory: str) -> dict[str, Any]:
    """GPT-2's published files: keys of the base model, and masks that nobody needs."""
    import torch
    from safetensors.torch import save_file

    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint
    from tests.checkpoint import torch_models as models

    reference = models.whole("gpt2")
    tensors = {n.removeprefix("transformer."): p for n, p in reference.state_dict().items() if n != "lm_head.weight"}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    models.on_rank_0(lambda: save_file(tensors, Path(directory, "model.safetensors")))
    model = models.sharded("gpt2")
    report = load_hf_checkpoint(model, directory)
    base = models.build("gpt2").transformer
    load_hf_checkpoint(base, directory)
    models.on_rank_0(lambda: reference.save_pretrained(Path(directory, "prefixed")))
    load_hf_checkpoint(base, Path(directory, "prefixed"))
    return {
        "equal": models.all_equal(models.parts(model), models.expected_parts(reference, model)),
        "base": models.all_equal(models.parts(base), models.parts(reference.transformer)),
        "ignored": report.report.ignored,
    }


@TORCH
@pytest.mark.contract("S4")
def test_a_base_models_prefix(tmp_path: Path) -> None:
    for result in run_distributed(load_without_prefix, str(tmp_path), world_size=2, timeout=90):
        assert result == {"equal": True, "base": True, "ignored": ("h.0.attn.bias",)}
