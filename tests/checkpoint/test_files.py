"""Which files count: index, single file, all; what an index may name; stale and mixed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor_parallel.byte_runs import box_runs
from hyper_parallel.tensor_parallel.checkpoint_files import open_checkpoint
from hyper_parallel.tensor_parallel.checkpoint_reader import FileReader, get_slice
from tests.checkpoint.files import file_bytes, from_bfloat16, random_tensors, to_bfloat16, write_checkpoint, write_index

TENSORS = random_tensors({"a": (4, 3), "b": (5,), "c": (2, 3, 4)})


def test_an_index_wins_over_stale_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS, files=2)
    stale = {name: array + 1 for name, array in TENSORS.items()}
    (tmp_path / "model.safetensors").write_bytes(file_bytes(stale))
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"damaged, and not read")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.stale == ("model-00003-of-00003.safetensors", "model.safetensors")
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(get_slice(checkpoint, name)[...], array)


def test_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(file_bytes({"a": TENSORS["a"]}))
    (tmp_path / "two.safetensors").write_bytes(file_bytes({"b": TENSORS["b"]}))
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}
    assert set(open_checkpoint(tmp_path / "two.safetensors").tensors) == {"b"}
    (tmp_path / "model.safetensors").write_bytes(file_bytes({"c": TENSORS["c"]}))
    single = open_checkpoint(tmp_path)
    assert set(single.tensors) == {"c"} and single.stale == ("one.safetensors", "two.safetensors")


def test_links_as_in_a_cache(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "blobs", TENSORS, files=2)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..", "blobs", path.name))
    assert set(open_checkpoint(tmp_path / "snapshot").tensors) == set(TENSORS)


BAD_MAPS: dict[str, tuple[Any, str]] = {
    "outside, relative": ({"a": "../other/model.safetensors"}, "outside its directory"),
    "outside, absolute": ({"a": "/etc/passwd.safetensors"}, "outside its directory"),
    "a folder below": ({"a": "sub/model.safetensors"}, "outside its directory"),
    "backslashes": ({"a": "..\\model.safetensors"}, "outside its directory"),
    "a null byte": ({"a": "model\0.safetensors"}, "outside its directory"),
    "the directory above": ({"a": ".."}, "outside its directory"),
    "nothing": ({"a": ""}, "outside its directory"),
    "a pickle": ({"a": "model.bin"}, "expected a *.safetensors file"),
    "a missing file": ({"a": "gone.safetensors"}, "names 'gone.safetensors', which is not there"),
    "a key that is elsewhere": ({"x": "model.safetensors"}, "says that 'x' is in model.safetensors, but it is not"),
    "numbers": ({"a": 1}, "expected a 'weight_map'"),
    "a list": (["a"], "expected a 'weight_map'"),
    "no entries": ({}, "is empty"),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_bad_indexes(case: str, tmp_path: Path) -> None:
    place, text = BAD_MAPS[case]
    write_checkpoint(tmp_path, TENSORS)
    write_index(tmp_path, place)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert text in str(caught.value) and "index.json" in str(caught.value)


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(CheckpointError, match="names 'a' twice"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        open_checkpoint(tmp_path)


def test_a_key_in_two_files(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(file_bytes({"a": TENSORS["a"], "b": TENSORS["b"]}))
    (tmp_path / "two.safetensors").write_bytes(file_bytes({"a": TENSORS["a"] + 1, "c": TENSORS["c"]}))
    with pytest.raises(CheckpointError, match="'a' is in one.safetensors and in two.safetensors"):
        open_checkpoint(tmp_path)
    write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.duplicated == (("a", "one.safetensors"),)
    np.testing.assert_array_equal(get_slice(checkpoint, "a")[...], TENSORS["a"] + 1)


def test_files_of_different_saves(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS, files=2, metadata={"save_id": "1"})
    other = file_bytes({"b": TENSORS["b"]}, {"save_id": "2"})
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(other)
    with pytest.raises(CheckpointError, match="come from different saves"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "text"),
    [([], "holds no checkpoint"), (["pytorch_model.bin"], "pickled weights are not read"), (None, "No such file")],
)
def test_no_checkpoint(files: list[str] | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name in files:
            (path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(path)


def test_slices(tmp_path: Path) -> None:
    bits = to_bfloat16(TENSORS["a"])
    write_checkpoint(tmp_path, {**TENSORS, "bf16": bits, "scalar": np.float32(3).reshape(())})
    checkpoint = open_checkpoint(tmp_path)
    handle = get_slice(checkpoint, "c")
    assert handle.get_shape() == [2, 3, 4] and handle.get_dtype() == "float32"
    for index in (np.s_[...], np.s_[:, 1:2], np.s_[0:1, :, 2:4], np.s_[..., 1:3], np.s_[1:1], np.s_[:, 0:0, 1:2]):
        piece = handle[index]
        np.testing.assert_array_equal(piece, TENSORS["c"][index])
        assert piece.flags.owndata or piece.base.flags.owndata  # nothing of the file stays mapped
    np.testing.assert_array_equal(get_slice(checkpoint, "bf16")[1:3], from_bfloat16(bits)[1:3])
    assert get_slice(checkpoint, "scalar")[...] == 3
    for index in (np.s_[0:3], np.s_[:, :, 0:5], np.s_[-1:2], np.s_[::2], np.s_[0], np.s_[:, :, :, :]):
        with pytest.raises(CheckpointError):
            handle[index]
    with pytest.raises(CheckpointError, match="no tensor 'd'"):
        get_slice(checkpoint, "d")


def test_a_file_that_changes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS)
    checkpoint = open_checkpoint(tmp_path)
    stored, runs = checkpoint.tensors["c"], box_runs((2, 3, 4), [(0, 2), (0, 3), (0, 4)], 4)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    with FileReader() as reader:  # the file is open already
        reader.read(stored, runs, lambda position, block: None)
        path.write_bytes(content[:-4])
        with pytest.raises(CheckpointError, match="has become shorter"):
            reader.read(stored, runs, lambda position, block: None)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="has changed since its header was read"):
        get_slice(checkpoint, "c")[...]


def test_metadata_of_an_index_is_not_needed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS)
    text = json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert set(open_checkpoint(tmp_path).tensors) == set(TENSORS)
