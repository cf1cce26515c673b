"""No rank ever holds the whole: the peak of memory while 4 ranks load 1 GiB, and while they draw and save less."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.tensor_parallel.safetensors_header import encode_header
from tests.checkpoint.own_model import this_models
from tests.harness import run_distributed, this_rank

MIB = 1 << 20
WIDTHS = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
LARGE = LlamaConfig(vocab_size=32000, num_hidden_layers=13, **WIDTHS)
SMALL = LlamaConfig(vocab_size=16000, num_hidden_layers=2, **WIDTHS)


def shapes(c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Of the model's parameters, in their order."""
    width = c.num_key_value_heads * c.head_size
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        attention = {"q": c.hidden_size, "k": width, "v": width, "o": c.hidden_size}
        found |= {f"{layer}.self_attn.{n}_proj.weight": (rows, c.hidden_size) for n, rows in attention.items()}
        found |= {f"{layer}.mlp.{n}_proj.weight": (c.intermediate_size, c.hidden_size) for n in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
        found |= {f"{layer}.{n}_layernorm.weight": (c.hidden_size,) for n in ("input", "post_attention")}
    found["model.norm.weight"] = (c.hidden_size,)
    found["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return found


def write_model(path: Path, config: LlamaConfig) -> int:
    """A checkpoint whose bytes repeat every 4 MiB; gives the size of the tensors."""
    block = np.random.default_rng(0).standard_normal(MIB, np.float32).tobytes()
    size = 4 * sum(math.prod(shape) for shape in shapes(config).values())
    with open(path, "xb") as file:
        file.write(encode_header({name: ("F32", shape) for name, shape in shapes(config).items()}, {"format": "pt"}))
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    return size


def peak_over_idle(action: Callable[[], Any]) -> tuple[int, float, Any]:
    """Bytes, seconds and result: the largest resident memory during `action` over that before it."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark begins anew
    idle, start = _status("VmRSS"), time.perf_counter()
    result = action()
    return _status("VmHWM") - idle, time.perf_counter() - start, result


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().split("\n")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure_load(config: LlamaConfig, path: str) -> dict[str, Any]:
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint

    models = this_models()
    model = models.large(config)
    peak, seconds, report = peak_over_idle(lambda: load_hf_checkpoint(model, path))
    sizes = [models.num_bytes(p) for p in models.named_parameters(model).values()]
    return {
        "load": (peak, seconds),
        "own": sum(sizes),
        "largest": max(sizes),
        "bytes": report.bytes_read[this_rank()],
        "file bytes": report.file_bytes,
        "rows": models.values(models.head(model)[:2]),
    }


def measure_save_and_draw(config: LlamaConfig, path: str, target: str) -> dict[str, Any]:
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
    from hyper_parallel.tensor_parallel.initialize import Normal
    from hyper_parallel.tensor_parallel.materialize import materialize

    models = this_models()
    model, other = models.large(config), models.large(config)
    load_hf_checkpoint(model, path)
    save = peak_over_idle(lambda: save_hf_checkpoint(model, target))
    draw = peak_over_idle(lambda: materialize(other, initial={"*": Normal(0.02)}))
    sizes = [models.num_bytes(p) for p in models.named_parameters(model).values()]
    return {"save": save[:2], "draw": draw[:2], "own": sum(sizes), "largest": max(sizes)}


def can_reset_peak() -> bool:
    return Path("/proc/self/clear_refs").exists() and "VmHWM" in Path("/proc/self/status").read_text()


def show(found: list[dict[str, Any]], size: int) -> None:
    """For those who run it with `-s`."""
    for rank, result in enumerate(found):
        figures = {what: result[what] for what in ("load", "save", "draw") if what in result}
        texts = [f"{w} {peak / MIB:.0f} MiB over idle in {seconds:.1f} s" for w, (peak, seconds) in figures.items()]
        print(f"rank {rank}, its part {result['own'] / MIB:.0f} of {size / MIB:.0f} MiB: {', '.join(texts)}")


pytestmark = [
    pytest.mark.contract("S3", "S4"),
    pytest.mark.skipif(not can_reset_peak(), reason="the system does not tell a process's peak of memory"),
]


def test_loading_a_gibibyte(platform: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = write_model(path, LARGE)
    assert 0.95 < size / 2**30 < 1.05
    found = run_distributed(measure_load, LARGE, str(path), platform=platform, world_size=4, timeout=100)
    show(found, size)
    content = np.memmap(path, np.uint8, "r")
    head_bytes = 4 * LARGE.vocab_size * LARGE.hidden_size
    for rank, result in enumerate(found):
        assert result["file bytes"] == size and result["bytes"] == result["own"] < 0.26 * size
        assert result["load"][0] < 0.25 * size + result["largest"] + 64 * MIB
        first = len(content) - head_bytes + rank * head_bytes // 4
        expected = content[first : first + result["rows"].nbytes].view(np.float32)
        np.testing.assert_array_equal(result["rows"].ravel(), expected)


def test_saving_and_drawing(platform: str, tmp_path: Path) -> None:
    path, target = tmp_path / "model.safetensors", tmp_path / "saved"
    size = write_model(path, SMALL)
    found = run_distributed(
        measure_save_and_draw, SMALL, str(path), str(target), platform=platform, world_size=4, timeout=100
    )
    show(found, size)
    for result in found:
        assert result["draw"][0] < 0.25 * size + result["largest"] + 64 * MIB
        assert result["save"][0] < 64 * MIB  # blocks of others, whatever the size
    content, saved = np.memmap(path, np.uint8, "r"), np.memmap(target / "model.safetensors", np.uint8, "r")
    assert np.array_equal(content[-size:], saved[-size:])  # the same tensors in the same order
