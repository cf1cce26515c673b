"""Headers of files that nobody vouches for: what is right is read, what is wrong is one clear error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor_parallel.safetensors_header import encode_header, read_header
from tests.checkpoint.files import file_bytes, random_tensors, raw_file


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = b"\0" * 8
DAMAGED = {
    "empty": (b"", "cut short: 0 bytes"),
    "shorter than the length": (b"\1\0\0", "cut short: 3 bytes"),
    "header cut short": (raw_file({"a": entry()}, length=500)[:100], "announces a header of 500 bytes"),
    "header too long": (raw_file({}, length=2**63), "at most 100000000"),
    "a pickle": (b"\x80\x04\x95" + b"x" * 50, "is it a safetensors file?"),
    "not JSON": (raw_file(b"{'a': 1}"), "not JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not JSON"),
    "an endless integer": (raw_file(b'{"a": ' + b"1" * 5000 + b"}"), "not JSON"),
    "deeply nested": (raw_file(b"[" * 100_000), "not JSON"),
    "not an object": (raw_file([1]), "a JSON list"),
    "a name twice": (raw_file(b'{"a": 1, "a": 1}'), "names 'a' twice"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "not a mapping of strings"),
    "not an entry": (raw_file({"a": 1}), "expected dtype, shape and data_offsets"),
    "another key": (raw_file({"a": entry() | {"codec": "zip"}}, EIGHT), "expected dtype, shape and data_offsets"),
    "unknown dtype": (raw_file({"a": entry("F33")}, EIGHT), "unknown dtype 'F33'"),
    "dtype of another type": (raw_file({"a": entry(["F32"])}, EIGHT), "unknown dtype"),
    "negative size": (raw_file({"a": entry(shape=[-2])}, EIGHT), "expected a list of sizes"),
    "true as a size": (raw_file({"a": entry(shape=[True, 2])}, EIGHT), "expected a list of sizes"),
    "a huge size": (raw_file({"a": entry(shape=[2**64])}, EIGHT), "expected a list of sizes"),
    "a product that overflows": (raw_file({"a": entry(shape=[2**62, 4, 2])}, EIGHT), "but data_offsets"),
    "a float as a size": (raw_file({"a": entry(shape=[2.0])}, EIGHT), "expected a list of sizes"),
    "offsets backwards": (raw_file({"a": entry(offsets=[8, 0])}, EIGHT), "expected [begin, end]"),
    "three offsets": (raw_file({"a": entry(offsets=[0, 4, 8])}, EIGHT), "expected [begin, end]"),
    "size and offsets differ": (raw_file({"a": entry(shape=[3])}, EIGHT), "takes 12 bytes, but data_offsets"),
    "beyond the end": (raw_file({"a": entry(offsets=[8, 16])}, EIGHT), "follows a hole"),
    "overlapping": (raw_file({"a": entry(), "b": entry(offsets=[4, 12])}, EIGHT + b"1234"), "overlaps"),
    "a hole": (raw_file({"a": entry(), "b": entry(offsets=[12, 20])}, EIGHT * 3), "follows a hole"),
    "tensors cut short": (raw_file({"a": entry()}, b"1234"), "is cut short"),
    "bytes after the tensors": (raw_file({"a": entry()}, EIGHT + b"1"), "longer than its header says"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    content, text = DAMAGED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert text in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    ordinary = "not an ordinary file"
    for name, text in (("pipe", ordinary), ("directory", ordinary), ("none", "No such file")):
        with pytest.raises(CheckpointError, match=text):
            read_header(tmp_path / name)
    with pytest.raises(CheckpointError, match="null"):
        read_header(tmp_path / "a\0b")


def test_what_is_right(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        **random_tensors({"matrix": (3, 5), "scalar": (), "empty": (0, 7), "vector": (9,)}),
        "half": np.ones((2, 2), np.float16),
        "flags": np.ones(3, bool),
        "bits": np.ones(2, np.uint16),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(tensors, {"format": "pt"}))
    header = read_header(path)
    assert header.metadata == {"format": "pt"} and header.file_bytes == path.stat().st_size
    content = path.read_bytes()
    for name, array in tensors.items():
        found = header.entries[name]
        assert found.shape == array.shape and found.num_bytes == array.nbytes
        assert content[found.start : found.start + found.num_bytes] == array.tobytes()
    assert header.entries["bits"].dtype == "bfloat16"


def test_the_safetensors_package_reads_our_headers(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = random_tensors({"a.weight": (3, 5), "b": (), "ü": (2, 0), "c": (4,)})
    header = encode_header({name: ("F32", array.shape) for name, array in tensors.items()}, {"format": "pt"})
    assert len(header) % 8 == 0
    path = tmp_path / "ours.safetensors"
    path.write_bytes(header + b"".join(array.tobytes() for array in tensors.values()))
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, tensors[name])
    save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = read_header(tmp_path / "theirs.safetensors")
    assert {name: e.shape for name, e in theirs.entries.items()} == {name: a.shape for name, a in tensors.items()}


@given(at=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_one_wrong_byte_never_surprises(tmp_path_factory: Any, at: int, value: int, cut: int) -> None:
    """Whatever is changed: an error of ours, or a header whose tensors lie in the file."""
    good = file_bytes(random_tensors({"a": (3, 4), "b": (5,)}))
    bad = bytearray(good)
    bad[at % len(bad)] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    for content in (bytes(bad), good[: cut % len(good)]):
        path.write_bytes(content)
        try:
            header = read_header(path)
        except CheckpointError:
            continue
        assert all(0 < e.start <= e.start + e.num_bytes <= len(content) for e in header.entries.values())
        assert json.loads(content[8 : header.header_bytes])
