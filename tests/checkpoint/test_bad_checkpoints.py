"""Checkpoints that do not fit or cannot be read: the same error on every rank, nobody waits, nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.files import file_bytes, write_checkpoint, write_index
from tests.checkpoint.own_model import all_equal, own_tensors, parts, this_models, without_values
from tests.checkpoint.test_load import load_own
from tests.harness import run_distributed, this_rank

pytestmark = pytest.mark.contract("S4")

NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, np.ndarray]


def without(name: str) -> Callable[[Path, Tensors], None]:
    return lambda path, tensors: void(write_checkpoint(path, {n: a for n, a in tensors.items() if n != name}))


def changed(name: str, array: np.ndarray) -> Callable[[Path, Tensors], None]:
    return lambda path, tensors: void(write_checkpoint(path, {**tensors, name: array}))


def void(_: Any) -> None:
    pass


def cut_short(path: Path, tensors: Tensors) -> None:
    file = write_checkpoint(path, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lying_size(path: Path, tensors: Tensors) -> None:
    file = write_checkpoint(path, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape": [251, 32]', b'"shape": [252, 32]', 1))


def lying_offset(path: Path, tensors: Tensors) -> None:
    file = write_checkpoint(path, {NORM: tensors[NORM]}) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[0, 128]", b"[9, 137]", 1))


def outside(path: Path, tensors: Tensors) -> None:
    write_checkpoint(path.parent / "secret", tensors)
    write_index(write_checkpoint(path, tensors), dict.fromkeys(tensors, "../secret/model.safetensors"))


def missing_file(path: Path, tensors: Tensors) -> None:
    write_checkpoint(path, tensors, files=2)
    (path / "model-00002-of-00002.safetensors").unlink()


def pickled(path: Path, _: Tensors) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04")


def key_twice(path: Path, tensors: Tensors) -> None:
    write_checkpoint(path, tensors)
    (path / "model.safetensors").rename(path / "one.safetensors")
    (path / "two.safetensors").write_bytes(file_bytes({NORM: tensors[NORM]}))


CASES: dict[str, tuple[Callable[[Path, Tensors], None], str]] = {
    "missing key": (without(DOWN), f"does not fit the model:\n  in no file: {DOWN}"),
    "missing head": (without("lm_head.weight"), "in no file: lm_head.weight"),
    "unexpected key": (changed("model.extra", np.ones(3, np.float32)), "not in the model: model.extra"),
    "other shape": (changed(NORM, np.ones(31, np.float32)), f"of another shape: {NORM} is (31,), expected (32,)"),
    "transposed": (changed(DOWN, np.ones((48, 32), np.float32)), f"{DOWN} is (48, 32), expected (32, 48)"),
    "integers": (changed(NORM, np.ones(32, np.int64)), f"of another kind: {NORM} is int64, expected float32"),
    "cut short": (cut_short, "is cut short"),
    "header lies about a size": (lying_size, "takes 32256 bytes, but data_offsets"),
    "header lies about an offset": (lying_offset, "follows a hole"),
    "index leads outside": (outside, "outside its directory"),
    "index names a missing file": (missing_file, "'model-00002-of-00002.safetensors', which is not there"),
    "pickled": (pickled, "pickled weights are not read"),
    "key in two files": (key_twice, "in one.safetensors and in two.safetensors"),
    "no directory": (lambda path, _: None, "No such file"),
}


def load_and_look(path: str, meta: bool) -> None:
    """Raises what loading raises, after looking whether the model is what it was."""
    from hyper_parallel.tensor_parallel.hf_checkpoint import load_hf_checkpoint

    model = this_models().sharded("own", meta=meta)
    before = {} if meta else parts(model)
    try:
        load_hf_checkpoint(model, path)
    finally:
        if meta:
            assert without_values(model)
        else:
            assert all_equal(parts(model), before)


@pytest.mark.parametrize("case", CASES)
def test_one_error_on_all_ranks(case: str, platform: str, tmp_path: Path) -> None:
    make, text = CASES[case]
    make(tmp_path / "model", own_tensors())
    for meta in (True, False):
        errors = run_distributed(
            load_and_look, str(tmp_path / "model"), meta, platform=platform, world_size=2, expect_error=True
        )
        assert [e.type for e in errors] == ["CheckpointError"] * 2
        assert len(set(errors)) == 1 and text in errors[0].message and str(tmp_path) in errors[0].message


def load_as_nobody(path: str, ranks: tuple[int, ...]) -> None:
    """On some ranks without the rights of the superuser, who may read everything."""
    nobody = this_rank() in ranks and os.geteuid() == 0
    if nobody:
        os.seteuid(65534)
    try:
        load_and_look(path, True)
    finally:
        if nobody:
            os.seteuid(0)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_directory_without_permission(ranks: tuple[int, ...], platform: str, tmp_path: Path) -> None:
    if os.geteuid() != 0 and ranks != (0, 1):
        pytest.skip("only the superuser can take the permission from one rank alone")
    path = write_checkpoint(tmp_path / "model", own_tensors())
    path.chmod(0)
    try:
        errors = run_distributed(load_as_nobody, str(path), ranks, platform=platform, world_size=2, expect_error=True)
    finally:
        path.chmod(0o700)
    assert len(set(errors)) == 1 and "Permission denied" in errors[0].message
    assert ("rank 1: " in errors[0].message) == (ranks == (1,))


def load_different(first: str, second: str) -> None:
    load_and_look(second if this_rank() else first, True)


def test_ranks_that_see_different_files(platform: str, tmp_path: Path) -> None:
    """As on nodes whose local disks hold different versions."""
    write_checkpoint(tmp_path / "one", own_tensors())
    write_checkpoint(tmp_path / "two", own_tensors(), files=2)
    errors = run_distributed(
        load_different, str(tmp_path / "one"), str(tmp_path / "two"), platform=platform, world_size=2, expect_error=True
    )
    assert len(set(errors)) == 1 and "ranks see different things: rank 0 'checkpoint" in errors[0].message
    errors = run_distributed(
        load_different, str(tmp_path / "one"), "/nowhere", platform=platform, world_size=2, expect_error=True
    )
    assert len(set(errors)) == 1 and errors[0].message.startswith("rank 1: cannot read the checkpoint directory /no")


def load_while_files_shrink(path: str) -> None:
    from unittest import mock

    from hyper_parallel.tensor_parallel import hf_load

    agree, file = hf_load.agree, Path(path, "model.safetensors")

    def agree_then_shrink(*args: Any, **kwargs: Any) -> Any:
        result = agree(*args, **kwargs)
        if this_rank() == 1:
            os.truncate(file, file.stat().st_size - 4)
        return result

    with mock.patch.object(hf_load, "agree", agree_then_shrink):
        load_own(path)


def test_a_file_that_changes_while_it_is_read(platform: str, tmp_path: Path) -> None:
    """One rank notices, all ranks raise."""
    path = write_checkpoint(tmp_path, own_tensors())
    errors = run_distributed(load_while_files_shrink, str(path), platform=platform, world_size=2, expect_error=True)
    assert len(set(errors)) == 1 and "has changed since its header was read" in errors[0].message


def test_options_that_are_no_patterns(platform: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, own_tensors())
    errors = run_distributed(load_own, str(path), keep="lm_head.*", platform=platform, world_size=2, expect_error=True)
    assert len(set(errors)) == 1 and "expected a sequence of patterns" in errors[0].message
    errors = run_distributed(
        load_own, str(path), keep=["lm_head.*"], platform=platform, world_size=2, expect_error=True
    )
    assert "left without values: lm_head.weight (to be kept, but" in errors[0].message
