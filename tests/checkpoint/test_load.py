"""Loading into models that several ranks share: every rank its own bytes, and the whole is what was in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.files import file_bytes, from_bfloat16, to_bfloat16, write_checkpoint
from tests.checkpoint.own_model import own_tensors, parts, this_models
from tests.harness import run_distributed, this_rank, this_world_size


def load_own(path: str, kind: str = "own", dtype: str = "float32", meta: bool = True, **options: Any) -> dict[str, Any]:
    """Load into the library's own Llama; what this rank holds, where it lies in the whole, the report."""
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint

    models = this_models()
    model = models.sharded(kind, dtype, meta)
    before = parts(model) if not meta else {}
    report = load_hf_checkpoint(model, path, **options)
    parameters = models.named_parameters(model)
    specs = {n: getattr(p, "_shard_spec", None) for n, p in parameters.items()}
    cuts = {n: (s.dim, s.ranges[this_rank()]) for n, s in specs.items() if s is not None and s.dim is not None}
    return {
        "parts": parts(model),
        "before": before,
        "cuts": cuts,
        "text": str(report),
        "report": report.report,
        "bytes": report.bytes_read,
        "file bytes": report.file_bytes,
        "dtypes": {models.dtype_name(p) for p in parameters.values()},
        "tied": models.head(model) is models.embedding(model),
    }


def check_parts(found: list[dict[str, Any]], whole: dict[str, np.ndarray]) -> None:
    for result in found:
        assert result["parts"].keys() == whole.keys()
        for name, part in result["parts"].items():
            expected = whole[name]
            if name in result["cuts"]:
                dim, ranges = result["cuts"][name]
                pieces = [expected.take(range(start, stop), dim) for start, stop in ranges]
                expected = np.concatenate(pieces, dim)
            np.testing.assert_array_equal(part, expected, err_msg=name)


@pytest.mark.contract("S4")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_reads_its_own_bytes(world_size: int, platform: str, tmp_path: Path) -> None:
    tensors = own_tensors()
    write_checkpoint(tmp_path, tensors, files=3)
    found = run_distributed(load_own, str(tmp_path), platform=platform, world_size=world_size)
    check_parts(found, tensors)
    total = sum(a.nbytes for a in tensors.values())
    expected = tuple(sum(p.nbytes for p in result["parts"].values()) for result in found)
    for result in found:
        assert result["file bytes"] == total and result["bytes"] == expected
        assert f"{total:,} bytes" in result["text"] and f"{expected[-1]:,}" in result["text"]
    head = [result["parts"]["lm_head.weight"].shape[0] for result in found]
    assert head == {1: [251], 2: [126, 125], 4: [63, 63, 63, 62]}[world_size]


@pytest.mark.contract("S4")
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float32"),
     ("float64", "float32")],
)  # fmt: skip
def test_one_cast(stored: str, wanted: str, platform: str, tmp_path: Path) -> None:
    values = own_tensors()
    if stored == "bfloat16":
        written = {name: to_bfloat16(a) for name, a in values.items()}
        values = {name: from_bfloat16(a) for name, a in written.items()}
    else:
        written = {name: a.astype(stored) for name, a in values.items()}
        values = {name: a.astype(np.float32) for name, a in written.items()}
    if wanted == "bfloat16":
        values = {name: from_bfloat16(to_bfloat16(a)) for name, a in values.items()}
    write_checkpoint(tmp_path, written)
    found = run_distributed(load_own, str(tmp_path), dtype=wanted, platform=platform, world_size=2)
    check_parts(found, values)
    assert found[0]["dtypes"] == {wanted}


@pytest.mark.contract("S4")
def test_tied_weights(platform: str, tmp_path: Path) -> None:
    """The head that is not in the file is the embedding; a copy in the file must be the same."""
    tensors = own_tensors(tied=True)
    embedding = tensors["model.embed_tokens.weight"]
    write_checkpoint(tmp_path / "without", tensors)
    found = run_distributed(load_own, str(tmp_path / "without"), "own tied", platform=platform, world_size=2)
    check_parts(found, tensors)
    assert found[0]["tied"] and not found[0]["report"].notes

    renamed = {"lm_head.weight" if "embed" in name else name: a for name, a in tensors.items()}
    write_checkpoint(tmp_path / "other name", renamed)
    check_parts(
        run_distributed(load_own, str(tmp_path / "other name"), "own tied", platform=platform, world_size=2), tensors
    )

    write_checkpoint(tmp_path / "twice", {**tensors, "lm_head.weight": embedding})
    found = run_distributed(load_own, str(tmp_path / "twice"), "own tied", platform=platform, world_size=2)
    check_parts(found, tensors)
    assert "lm_head.weight" in found[0]["report"].duplicated[0]

    changed = embedding.copy()
    changed[-1, -1] += 1  # on the last rank only
    write_checkpoint(tmp_path / "differs", {**tensors, "lm_head.weight": changed})
    errors = run_distributed(
        load_own, str(tmp_path / "differs"), "own tied", platform=platform, world_size=2, expect_error=True
    )
    assert len(set(errors)) == 1 and "rank 1: " in errors[0].message
    assert "one parameter here, different values in the files: lm_head.weight" in errors[0].message
    found = run_distributed(
        load_own, str(tmp_path / "differs"), "own tied", skip=["lm_head.*"], platform=platform, world_size=2
    )
    check_parts(found, tensors)
    assert found[0]["report"].ignored == ("lm_head.weight",)


@pytest.mark.contract("S4")
def test_stale_files_are_reported_and_not_read(platform: str, tmp_path: Path) -> None:
    tensors = own_tensors()
    write_checkpoint(tmp_path, tensors, files=2)
    stale = {name: a + 1 for name, a in tensors.items()}
    (tmp_path / "model.safetensors").write_bytes(file_bytes(stale))
    found = run_distributed(load_own, str(tmp_path), platform=platform, world_size=2)
    check_parts(found, tensors)
    assert found[0]["report"].stale == ("model.safetensors",)
    assert "not read): model.safetensors" in found[0]["text"]


@pytest.mark.contract("S4")
def test_prefixes_and_old_keys(platform: str, tmp_path: Path) -> None:
    """Keys of rotary buffers in old files are left out; memory that is there is overwritten, not what is kept."""
    tensors = own_tensors()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    missing = "model.norm.weight"
    write_checkpoint(tmp_path, {**{n: a for n, a in tensors.items() if n != missing}, **old})
    found = run_distributed(
        load_own, str(tmp_path), meta=False, keep=["*.norm.weight"], platform=platform, world_size=2
    )
    for result in found:
        assert result["report"].kept == (missing,) and result["report"].ignored == tuple(old)
        np.testing.assert_array_equal(result["parts"][missing], result["before"][missing])
        result["parts"][missing] = tensors[missing]
    check_parts(found, tensors)


def load_as_loaders_do(path: str) -> bool:
    from hyper_parallel.tensor_parallel.checkpoint_files import open_checkpoint
    from hyper_parallel.tensor_parallel.checkpoint_reader import get_slice
    from hyper_parallel.tensor_parallel.shard_loader import ParallelRule, make_loader

    checkpoint, rank, ranks = open_checkpoint(path), this_rank(), this_world_size()
    results = []
    for rule in (
        ParallelRule("column"),
        ParallelRule("row"),
        ParallelRule("fused_column", parts=(8, 2, 2), heads=(4, 1, 1)),
        ParallelRule("head_column", heads=(2,)),
        ParallelRule("replicate"),
    ):
        whole = get_slice(checkpoint, "w")[...]
        loader: Any = make_loader(rule, ".weight")
        part = loader.load(get_slice(checkpoint, "w"), rank, ranks)
        spec = loader.spec(whole.shape, ranks)
        results.append(np.array_equal(part, np.concatenate([whole[i] for i in spec.slices(rank)], spec.dim or 0)))
    return all(results)


def misuse_the_registry() -> list[str]:
    from hyper_parallel.tensor_parallel import shard_loader

    found, kinds = [], shard_loader.loader_kinds()
    for kind in ("no_such_kind", *kinds[:1]):
        try:
            if kind in kinds:
                shard_loader.register_loader(kind)(shard_loader.ReplicateLoader)
            else:
                shard_loader.make_loader(shard_loader.ParallelRule(kind), ".weight")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    assert shard_loader.loader_kinds() == kinds
    return [*found, ", ".join(kinds)]


@pytest.mark.contract("S2")
def test_unknown_and_duplicate_kinds(platform: str) -> None:
    unknown, duplicate, kinds = run_distributed(misuse_the_registry, platform=platform, world_size=1)[0]
    assert {"column", "row", "vocab_embed", "replicate"} <= set(kinds.split(", "))
    for message in (unknown, duplicate):
        assert message.startswith("ParallelPlanError") and all(kind in message for kind in kinds.split(", "))


@pytest.mark.contract("S1", "S2")
def test_shard_loaders_read_from_our_files(platform: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": np.arange(12 * 5, dtype=np.float32).reshape(12, 5)})
    assert run_distributed(load_as_loaders_do, str(tmp_path), platform=platform, world_size=2) == [True, True]
