"""Saving: what Hugging Face's libraries load, whole, once, and all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hyper_parallel.tensor_parallel.initialize import Normal
from tests.checkpoint.files import file_bytes, write_checkpoint
from tests.checkpoint.own_model import own_tensors, this_models
from tests.checkpoint.test_load import check_parts, load_own
from tests.harness import run_distributed, this_rank

pytestmark = pytest.mark.contract("S4")


def save_own(path: str, target: str, kind: str = "own", transpose: bool = False, **options: Any) -> tuple[str, ...]:
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint

    models = this_models()
    model = models.sharded(kind, options.pop("dtype", "float32"))
    load_hf_checkpoint(model, path)
    if transpose:
        models.transpose_memory(model)
    return save_hf_checkpoint(model, target, **options)


@pytest.mark.parametrize("transpose", [False, True])
def test_another_degree(transpose: bool, platform: str, tmp_path: Path) -> None:
    """Saved at 4, loaded at 2 and 1, saved again: the same values, also of parameters that are not contiguous."""
    tensors = own_tensors()
    write_checkpoint(tmp_path / "one", tensors)
    paths = [str(tmp_path / name) for name in ("one", "two", "three")]
    run_distributed(
        save_own, paths[0], paths[1], "own", transpose, max_shard_bytes=30_000, platform=platform, world_size=4
    )
    run_distributed(save_own, paths[1], paths[2], platform=platform, world_size=2)
    check_parts(run_distributed(load_own, paths[2], platform=platform, world_size=1), tensors)
    check_parts(run_distributed(load_own, paths[1], platform=platform, world_size=4), tensors)


def test_bfloat16(platform: str, tmp_path: Path) -> None:
    tensors = {name: np.round(a * 4) for name, a in own_tensors().items()}  # exact in bfloat16
    write_checkpoint(tmp_path / "one", tensors)
    run_distributed(
        save_own, str(tmp_path / "one"), str(tmp_path / "two"), dtype="bfloat16", platform=platform, world_size=2
    )
    found = run_distributed(load_own, str(tmp_path / "two"), platform=platform, world_size=2)
    check_parts(found, tensors)
    assert found[0]["file bytes"] == sum(a.nbytes for a in tensors.values()) // 2


def test_an_existing_checkpoint(platform: str, tmp_path: Path) -> None:
    """It is kept unless asked otherwise; then nothing of it is left, other files are."""
    first, second = own_tensors(), own_tensors(seed=1)
    write_checkpoint(tmp_path / "two", second)
    target = write_checkpoint(tmp_path / "target", first, files=3)
    (target / "tokenizer.json").write_text("{}")
    (target / ".model-00001-of-00009.safetensors.12.part").write_text("left by a save that was killed")
    arguments = (str(tmp_path / "two"), str(target))
    errors = run_distributed(save_own, *arguments, platform=platform, world_size=2, expect_error=True)
    assert len(set(errors)) == 1 and "pass overwrite=True" in errors[0].message
    check_parts(run_distributed(load_own, str(target), platform=platform, world_size=2), first)
    run_distributed(save_own, *arguments, overwrite=True, platform=platform, world_size=2)
    check_parts(run_distributed(load_own, str(target), platform=platform, world_size=2), second)
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    run_distributed(save_own, *arguments, overwrite=True, max_shard_bytes=50_000, platform=platform, world_size=2)
    found = run_distributed(load_own, str(target), platform=platform, world_size=2)
    check_parts(found, second)
    assert found[0]["report"].stale == () and not (target / "model.safetensors").exists()


def save_on_a_full_disk(path: str, target: str, rank: int) -> None:
    from hyper_parallel.tensor_parallel import save_stream

    def full(file: Any, data: Any) -> None:
        raise OSError(28, "No space left on device", file.name)

    with mock.patch.object(save_stream, "_write_all", full if this_rank() == rank else save_stream._write_all):
        save_own(path, target, max_shard_bytes=30_000, overwrite=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full(rank: int, platform: str, tmp_path: Path) -> None:
    """On one rank: all raise, what was there before is whole, nothing else is left."""
    first = own_tensors()
    write_checkpoint(tmp_path / "two", own_tensors(seed=1))
    target = write_checkpoint(tmp_path / "target", first, files=2)
    before = sorted(p.name for p in target.iterdir())
    errors = run_distributed(
        save_on_a_full_disk,
        str(tmp_path / "two"),
        str(target),
        rank,
        platform=platform,
        world_size=2,
        expect_error=True,
    )
    assert len(set(errors)) == 1 and f"rank {rank}: cannot write" in errors[0].message
    assert "No space left on device" in errors[0].message
    assert sorted(p.name for p in target.iterdir()) == before
    check_parts(run_distributed(load_own, str(target), platform=platform, world_size=2), first)


def test_a_save_that_was_killed_between_its_files(platform: str, tmp_path: Path) -> None:
    """A file of a new save among those of an old one under the same index is noticed."""
    write_checkpoint(tmp_path / "one", own_tensors())
    write_checkpoint(tmp_path / "two", own_tensors(seed=1))
    for name in ("one", "two"):
        run_distributed(
            save_own,
            str(tmp_path / name),
            str(tmp_path / f"{name} saved"),
            max_shard_bytes=40_000,
            platform=platform,
            world_size=2,
        )
    file = "model-00002-of-00004.safetensors"
    (tmp_path / "two saved" / file).replace(tmp_path / "one saved" / file)
    errors = run_distributed(load_own, str(tmp_path / "one saved"), platform=platform, world_size=2, expect_error=True)
    assert len(set(errors)) == 1 and "come from different saves" in errors[0].message


def save_alone(path: str, target: str) -> list[str]:
    """As under `if rank == 0`: rank 0 waits, the other one comes late."""
    import time
    import warnings

    from hyper_parallel.tensor_parallel import checkpoint_agreement

    with warnings.catch_warnings(record=True) as caught, mock.patch.object(checkpoint_agreement, "_WAIT_SECONDS", 0.3):
        warnings.simplefilter("always")
        from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint

        model = this_models().sharded("own")
        load_hf_checkpoint(model, path)
        if this_rank() == 1:
            time.sleep(1.5)
        save_hf_checkpoint(model, target)
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def save_on_one_rank_load_on_the_other(path: str, target: str) -> None:
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint

    model = this_models().sharded("own")
    load_hf_checkpoint(model, path)
    if this_rank() == 0:
        save_hf_checkpoint(model, target)
    load_hf_checkpoint(model, path)


def save_elsewhere(path: str, target: str) -> None:
    save_own(path, f"{target}{this_rank()}")


def save_without_values(path: str, target: str) -> None:
    from hyper_parallel.tensor_parallel.hf_checkpoint import save_hf_checkpoint

    save_hf_checkpoint(this_models().sharded("own"), target)


def save_under_a_file(path: str, target: str) -> None:
    save_own(path, f"{path}/model.safetensors/deeper")


def arguments_of_one_rank(path: str, target: str) -> dict[str, str]:
    """What each call raises whose arguments the last rank alone has wrong."""
    from hyper_parallel import load_hf_checkpoint, materialize, save_hf_checkpoint
    from tests.tensor_parallel.test_uneven import said

    model, last = this_models().sharded("own"), this_rank() == 1
    load_hf_checkpoint(model, path)
    wrong: Any = {True: 3, False: model}
    return said({
        "save 3": lambda: save_hf_checkpoint(wrong[last], target),
        "save to 3": lambda: save_hf_checkpoint(model, 3 if last else target),  # type: ignore[arg-type]
        "load 3": lambda: load_hf_checkpoint(wrong[last], path),
        "load from 3.5": lambda: load_hf_checkpoint(model, 3.5 if last else path),  # type: ignore[arg-type]
        "materialize 3": lambda: materialize(wrong[last], initial={"*": Normal(0.02)}),
    })  # fmt: skip


def test_arguments_of_one_rank_only(platform: str, tmp_path: Path) -> None:
    """The others are told, instead of waiting."""
    path = str(write_checkpoint(tmp_path / "one", own_tensors()))
    one, other = run_distributed(arguments_of_one_rank, path, str(tmp_path / "two"), platform=platform, world_size=2)
    assert one == other and not (tmp_path / "two" / "model.safetensors").exists()
    assert all(error.startswith("CheckpointError: rank 1: ") for error in one.values()), one
    for call in ("save", "load", "materialize"):
        assert one[f"{call} 3"].endswith("expected a module, found int")


def test_saving_is_collective(platform: str, tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "one", own_tensors()))
    first, second = run_distributed(save_alone, path, str(tmp_path / "two"), platform=platform, world_size=2)
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
def test_misuse(function: Any, text: str, platform: str, tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "one", own_tensors()))
    errors = run_distributed(function, path, str(tmp_path / "two"), platform=platform, world_size=2, expect_error=True)
    assert [e.type for e in errors] == ["CheckpointError"] * 2
    assert len(set(errors)) == 1 and text in errors[0].message


def save_replicas(path: str, target: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Two data-parallel replicas of a model on two ranks each."""
    from hyper_parallel import init_device_mesh
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint, save_hf_checkpoint

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = this_models().sharded("own", mesh=mesh["tp"])
    report = load_hf_checkpoint(model, path)
    return save_hf_checkpoint(model, target, max_shard_bytes=40_000), report.bytes_read


def test_of_replicas_one_writes(platform: str, tmp_path: Path) -> None:
    tensors = own_tensors()
    path = str(write_checkpoint(tmp_path / "one", tensors))
    found = run_distributed(save_replicas, path, str(tmp_path / "two"), platform=platform, world_size=4)
    assert len(found[0][0]) > 2 and found == [found[0]] * 4
    read = found[0][1]
    assert read[:2] == read[2:] and sum(read[:2]) >= sum(a.nbytes for a in tensors.values())
    check_parts(run_distributed(load_own, str(tmp_path / "two"), platform=platform, world_size=2), tensors)


def test_names_and_metadata(platform: str, tmp_path: Path) -> None:
    """One file has no number; all of one save have one id."""
    path = str(write_checkpoint(tmp_path / "one", own_tensors(tied=True)))
    [names] = run_distributed(
        save_own, path, str(tmp_path / "two"), "own tied", save_config=False, platform=platform, world_size=1
    )
    assert names == ("model.safetensors",) == tuple(p.name for p in (tmp_path / "two").iterdir())
    content = (tmp_path / "two" / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert "lm_head.weight" not in header and len(header["__metadata__"]["save_id"]) == 16
    assert len(content) - len(file_bytes(own_tensors(tied=True))) < 200
