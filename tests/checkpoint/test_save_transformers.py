"""Saved files in the hands of transformers: whole, unpadded, tied weights once, and the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.files import write_checkpoint
from tests.checkpoint.own_model import own_tensors, this_models
from tests.harness import run_distributed

pytest.importorskip("transformers")
pytestmark = pytest.mark.contract("S4")


def save_for_transformers(kind: str, directory: str, max_shard_bytes: int) -> dict[str, Any]:
    """Shard a model, save it, load it with transformers; is it what it was?"""
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
    from tests.checkpoint import torch_models as models

    reference = models.whole(kind)
    models.on_rank_0(lambda: reference.save_pretrained(Path(directory, "whole")))
    model = models.sharded(kind)
    load_hf_checkpoint(model, Path(directory, "whole"))
    target = Path(directory, "saved")
    names = save_hf_checkpoint(model, target, max_shard_bytes=max_shard_bytes)
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    return {
        "names": names,
        "class": type(loaded) is type(reference),
        "logits": np.array_equal(models.logits(loaded), models.logits(reference)),
        "weights": models.all_equal(models.parts(loaded), models.parts(reference)),
        "after": np.abs(models.logits(model) - models.logits(reference)).max(),
    }


@pytest.mark.platform("torch")
@pytest.mark.parametrize(("kind", "world_size"), [("llama", 4), ("qwen2", 2), ("gpt2", 2), ("phi3", 4)])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_it(kind: str, world_size: int, max_shard_bytes: int, tmp_path: Path) -> None:
    found = run_distributed(
        save_for_transformers, kind, str(tmp_path), max_shard_bytes, world_size=world_size, timeout=90
    )
    for result in found:
        assert result["class"] and result["logits"] and result["weights"] and result["after"] < 2e-5
        assert (len(result["names"]) > 1) == (max_shard_bytes < 10**9)
    from safetensors import safe_open

    saved: dict[str, tuple[int, ...]] = {}
    for name in found[0]["names"]:
        with safe_open(tmp_path / "saved" / name, "np") as file:
            assert file.metadata()["format"] == "pt"
            saved |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    tied = kind in ("llama", "gpt2")
    tables = [shape for key, shape in saved.items() if "embed_tokens" in key or "wte" in key or "lm_head" in key]
    assert tables == [(251, 32)] * (1 if tied else 2)  # unpadded, tied ones once
    files = {p.name for p in (tmp_path / "saved").iterdir()}
    index = {"model.safetensors.index.json"} if len(found[0]["names"]) > 1 else set()
    assert files == {*found[0]["names"], "config.json"} | index
    if index:
        content = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
        assert set(content["weight_map"]) == set(saved)
        assert all((tmp_path / "saved" / name).stat().st_size < 20_000 + 8192 + 4 * 251 * 32 for name in files)


def save_with_logits(path: str, target: str, kind: str, dtype: str) -> np.ndarray:
    """Load into the library's own Llama, save; the logits of what was saved."""
    from hyper_parallel import load_hf_checkpoint, save_hf_checkpoint

    models = this_models()
    model = models.sharded(kind, dtype)
    load_hf_checkpoint(model, path)
    assert len(save_hf_checkpoint(model, target, max_shard_bytes=60_000)) > 1
    if dtype != "float32":  # the logits in float32 of the weights as they were saved
        model = models.sharded(kind)
        load_hf_checkpoint(model, target)
    logits: np.ndarray = models.logits(model)
    return logits


def load_with_transformers(path: str) -> tuple[str, str, np.ndarray, tuple[int, ...]]:
    import torch
    import transformers

    from tests.checkpoint import torch_models as models

    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    dtype = models.dtype_name(model.lm_head.weight)
    return type(model).__name__, dtype, models.logits(model.to(torch.float32)), tuple(model.lm_head.weight.shape)


@pytest.mark.parametrize(("kind", "dtype"), [("own", "float32"), ("own tied", "float32"), ("own", "bfloat16")])
def test_of_the_librarys_own_llama(kind: str, dtype: str, platform: str, tmp_path: Path) -> None:
    """Saved on either platform at tp = 2, loaded by transformers on PyTorch."""
    tensors = {name: a * np.float32(0.1) for name, a in own_tensors(tied=kind == "own tied").items()}
    path, target = str(write_checkpoint(tmp_path / "one", tensors)), str(tmp_path / "two")
    found = run_distributed(save_with_logits, path, target, kind, dtype, platform=platform, world_size=2, timeout=60)
    [(name, read_as, logits, shape)] = run_distributed(load_with_transformers, target, world_size=1, timeout=90)
    assert (name, read_as, shape) == ("LlamaForCausalLM", dtype, (251, 32))
    for result in found:
        np.testing.assert_allclose(result, logits, rtol=0, atol=2e-5 * np.abs(logits).max())
    stored = [key for file in Path(target).glob("*.safetensors") for key in read_keys(file)]
    assert sorted(stored) == sorted(tensors)


def read_keys(file: Path) -> list[str]:
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [key for key in header if key != "__metadata__"]
