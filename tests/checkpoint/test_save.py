"""Saving: what Hugging Face's libraries load, whole, once, and all or nothing."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.checkpoint.files import file_bytes, write_checkpoint
from tests.checkpoint.test_load import check_parts, load_own, own_tensors
from tests.harness import run_distributed, this_rank

pytestmark = [pytest.mark.platform("torch"), pytest.mark.contract("S4")]


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


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
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


def save_own(path: str, target: str, kind: str = "own", transpose: bool = False, **options: Any) -> tuple[str, ...]:
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
    from tests.checkpoint import torch_models as models

    model = models.sharded(kind, options.pop("dtype", "float32"))
    load_hf_checkpoint(model, path)
    if transpose:  # the same values in another order in memory
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()
                assert not parameter.is_contiguous()
    return save_hf_checkpoint(model, target, **options)


@pytest.mark.parametrize("transpose", [False, True])
def test_another_degree(transpose: bool, tmp_path: Path) -> None:
    """Saved at 4, loaded at 2 and 1, saved again: the same values, also of parameters that are not contiguous."""
    tensors = own_tensors()
    write_checkpoint(tmp_path / "one", tensors)
    paths = [str(tmp_path / name) for name in ("one", "two", "three")]
    run_distributed(save_own, paths[0], paths[1], "own", transpose, max_shard_bytes=30_000, world_size=4)
    run_distributed(save_own, paths[1], paths[2], world_size=2)
    check_parts(run_distributed(load_own, paths[2], world_size=1), tensors)
    check_parts(run_distributed(load_own, paths[1], world_size=4), tensors)


def test_bfloat16(tmp_path: Path) -> None:
    tensors = {name: np.round(a * 4) for name, a in own_tensors().items()}  # exact in bfloat16
    write_checkpoint(tmp_path / "one", tensors)
    run_distributed(save_own, str(tmp_path / "one"), str(tmp_path / "two"), dtype="bfloat16", world_size=2)
    found = run_distributed(load_own, str(tmp_path / "two"), world_size=2)
    check_parts(found, tensors)
    assert found[0]["file bytes"] == sum(a.nbytes for a in tensors.values()) // 2


def test_an_existing_checkpoint(tmp_path: Path) -> None:
    """It is kept unless asked otherwise; then nothing of it is left, other files are."""
    first, second = own_tensors(), own_tensors(seed=1)
    write_checkpoint(tmp_path / "two", second)
    target = write_checkpoint(tmp_path / "target", first, files=3)
    (target / "tokenizer.json").write_text("{}")
    (target / ".model-00001-of-00009.safetensors.12.part").write_text("left by a save that was killed")
    arguments = (str(tmp_path / "two"), str(target))
    errors = run_distributed(save_own, *arguments, world_size=2, expect_error=True)
    assert len(set(errors)) == 1 and "pass overwrite=True" in errors[0].message
    check_parts(run_distributed(load_own, str(target), world_size=2), first)
    run_distributed(save_own, *arguments, overwrite=True, world_size=2)
    check_parts(run_distributed(load_own, str(target), world_size=2), second)
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    run_distributed(save_own, *arguments, overwrite=True, max_shard_bytes=50_000, world_size=2)
    found = run_distributed(load_own, str(target), world_size=2)
    check_parts(found, second)
    assert found[0]["report"].stale == () and not (target / "model.safetensors").exists()


def save_on_a_full_disk(path: str, target: str, rank: int) -> None:
    from hyper_parallel.tensor_parallel import save_stream

    def full(file: Any, data: Any) -> None:
        raise OSError(28, "No space left on device", file.name)

    with mock.patch.object(save_stream, "_write_all", full if this_rank() == rank else save_stream._write_all):
        save_own(path, target, max_shard_bytes=30_000, overwrite=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full(rank: int, tmp_path: Path) -> None:
    """On one rank: all raise, what was there before is whole, nothing else is left."""
    first = own_tensors()
    write_checkpoint(tmp_path / "two", own_tensors(seed=1))
    target = write_checkpoint(tmp_path / "target", first, files=2)
    before = sorted(p.name for p in target.iterdir())
    errors = run_distributed(
        save_on_a_full_disk, str(tmp_path / "two"), str(target), rank, world_size=2, expect_error=True
    )
    assert len(set(errors)) == 1 and f"rank {rank}: cannot write" in errors[0].message
    assert "No space left on device" in errors[0].message
    assert sorted(p.name for p in target.iterdir()) == before
    check_parts(run_distributed(load_own, str(target), world_size=2), first)


def test_a_save_that_was_killed_between_its_files(tmp_path: Path) -> None:
    """A file of a new save among those of an old one under the same index is noticed."""
    write_checkpoint(tmp_path / "one", own_tensors())
    write_checkpoint(tmp_path / "two", own_tensors(seed=1))
    for name in ("one", "two"):
        run_distributed(
            save_own, str(tmp_path / name), str(tmp_path / f"{name} saved"), max_shard_bytes=40_000, world_size=2
        )
    file = "model-00002-of-00004.safetensors"
    (tmp_path / "two saved" / file).replace(tmp_path / "one saved" / file)
    errors = run_distributed(load_own, str(tmp_path / "one saved"), world_size=2, expect_error=True)
    assert len(set(errors)) == 1 and "come from different saves" in errors[0].message


def save_alone(path: str, target: str) -> list[str]:
    """As under `if rank == 0`: rank 0 waits, the other one comes late."""
    import time
    import warnings

    from hyper_parallel.tensor_parallel import checkpoint_agreement

    with warnings.catch_warnings(record=True) as caught, mock.patch.object(checkpoint_agreement, "_WAIT_SECONDS", 0.3):
        warnings.simplefilter("always")
        from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
        from tests.checkpoint import torch_models as models

        model = models.sharded("own")
        load_hf_checkpoint(model, path)
        if this_rank() == 1:
            time.sleep(1.5)
        save_hf_checkpoint(model, target)
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def save_on_one_rank_load_on_the_other(path: str, target: str) -> None:
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
    from tests.checkpoint import torch_models as models

    model = models.sharded("own")
    load_hf_checkpoint(model, path)
    if this_rank() == 0:
        save_hf_checkpoint(model, target)
    load_hf_checkpoint(model, path)


def save_elsewhere(path: str, target: str) -> None:
    save_own(path, f"{target}{this_rank()}")


def save_without_values(path: str, target: str) -> None:
    from hyper_parallel.tensor_parallel.hf_checkpoint import save_hf_checkpoint
    from tests.checkpoint import torch_models as models

    save_hf_checkpoint(models.sharded("own"), target)


def save_under_a_file(path: str, target: str) -> None:
    save_own(path, f"{path}/model.safetensors/deeper")


def test_saving_is_collective(tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "one", own_tensors()))
    first, second = run_distributed(save_alone, path, str(tmp_path / "two"), world_size=2)
    assert len(first) == 1 and "save_hf_checkpoint is collective: rank 0 has waited 0.3 s" in first[0]
    assert "if rank == 0" in first[0] and not second


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (save_on_one_rank_load_on_the_other, "rank 0 at 'save_hf_checkpoint', rank 1 at 'load_hf_checkpoint'"),
        (save_elsewhere, "ranks see different things"),
        (save_without_values, "has no values: the model was built without memory"),
        (save_under_a_file, "Not a directory"),
    ],
)
def test_misuse(function: Any, text: str, tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "one", own_tensors()))
    errors = run_distributed(function, path, str(tmp_path / "two"), world_size=2, expect_error=True)
    assert [e.type for e in errors] == ["CheckpointError"] * 2
    assert len(set(errors)) == 1 and text in errors[0].message


def save_replicas(path: str, target: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Two data-parallel replicas of a model on two ranks each."""
    import torch

    from hyper_parallel import init_device_mesh
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint
    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.checkpoint import torch_models as models

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = models.build("own")
    parallelize_module(model, mesh["tp"])
    report = load_hf_checkpoint(model, path)
    return save_hf_checkpoint(model, target, max_shard_bytes=40_000), report.bytes_read


def test_of_replicas_one_writes(tmp_path: Path) -> None:
    tensors = own_tensors()
    path = str(write_checkpoint(tmp_path / "one", tensors))
    found = run_distributed(save_replicas, path, str(tmp_path / "two"), world_size=4)
    assert len(found[0][0]) > 2 and found == [found[0]] * 4
    read = found[0][1]
    assert read[:2] == read[2:] and sum(read[:2]) >= sum(a.nbytes for a in tensors.values())
    check_parts(run_distributed(load_own, str(tmp_path / "two"), world_size=2), tensors)


def test_names_and_metadata(tmp_path: Path) -> None:
    """One file has no number; all of one save have one id."""
    path = str(write_checkpoint(tmp_path / "one", own_tensors(tied=True)))
    [names] = run_distributed(save_own, path, str(tmp_path / "two"), "own tied", save_config=False, world_size=1)
    assert names == ("model.safetensors",) == tuple(p.name for p in (tmp_path / "two").iterdir())
    content = (tmp_path / "two" / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert "lm_head.weight" not in header and len(header["__metadata__"]["save_id"]) == 16
    assert len(content) - len(file_bytes(own_tensors(tied=True))) < 200
