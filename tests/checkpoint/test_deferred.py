"""MindSpore: parameters without memory, what is known of their first values, and what keeps its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.files import from_bfloat16, to_bfloat16, write_checkpoint
from tests.checkpoint.test_memory import MIB, can_reset_peak
from tests.harness import run_distributed

pytestmark = [pytest.mark.platform("mindspore"), pytest.mark.contract("S3")]


def call(function: str, args: tuple[Any, ...]) -> Any:
    """In a worker: a function of the module that imports MindSpore, which the parent does not."""
    return getattr(importlib.import_module("tests.checkpoint.deferred_workers"), function)(*args)


def run(function: str, *args: Any, **options: Any) -> Any:
    """Its result on the only rank."""
    return run_distributed(call, function, args, platform="mindspore", world_size=1, **options)[0]


def test_what_is_deferred_and_how_it_is_drawn() -> None:
    found = run("build_and_draw")
    norms = ["norm.beta", "norm.gamma", *(f"running.{n}" for n in ("beta", "gamma"))]
    statistics = ["running.moving_mean", "running.moving_variance"]
    tables = ["early", "older.embedding_table", "padded.weight"]
    assert found["deferred"] == sorted(["dense.bias", "dense.weight", "half", "ones", *norms, *statistics, *tables])
    values = found["values"]
    for name, value in {"ones": 1, "norm.gamma": 1, "norm.beta": 0, "running.moving_variance": 1, "count": 0}.items():
        assert (values[name] == value).all(), name
    np.testing.assert_array_equal(values["half"], from_bfloat16(to_bfloat16(np.full((2, 2), 0.1, np.float32))))
    np.testing.assert_array_equal(values["steps"], [0, 1, 2])  # values of its own
    for name, row, std in (("padded.weight", 3, 1.0), ("older.embedding_table", 0, 0.01)):
        assert [i for i, r in enumerate(values[name]) if not r.any()] == [row]
        assert 0.5 * std < np.delete(values[name], row, 0).std() < 1.5 * std
    bound = 8**-0.5
    assert 0.5 * bound < np.abs(values["dense.weight"]).max() <= bound and np.abs(values["dense.bias"]).max() <= bound
    np.testing.assert_array_equal(found["beside"][0], np.cos(np.arange(4)).astype(np.float32))
    np.testing.assert_array_equal(found["beside"][1], np.tril(np.ones((3, 3))))
    expected = values["dense.weight"].sum(1) + values["dense.bias"]
    np.testing.assert_allclose(found["forward"][0], expected, rtol=0, atol=1e-6)


def test_only_inside_and_only_in_this_thread() -> None:
    outside, nested, inside, other_thread, after_an_error, still_active, restored = run("scope")
    assert not outside and nested and inside and not other_thread and not after_an_error and not still_active
    assert restored


@pytest.mark.skipif(not can_reset_peak(), reason="the system does not tell a process's peak of memory")
def test_building_takes_no_memory() -> None:
    peak, size = run("no_memory", 4096)
    assert size == 512 * MIB and peak < 8 * MIB


def test_distributions_are_what_mindspore_draws() -> None:
    for name, (draw, std, largest) in run("distributions").items():
        low, high = draw.numbers
        if draw.kind == "uniform":
            assert low == -high and abs(std * 3**0.5 - high) < 0.01 * high and largest <= high * (1 + 1e-6), name
        else:
            assert draw.kind == "normal" and low == 0 and abs(std - high) < 0.01 * high, name


def test_bytes_and_rounding() -> None:
    """One rounding, to nearest with ties to even; bytes as PyTorch has them."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, -np.inf, np.nan, 1e-40, 0.0, -0.0]
    values = np.array([*ties, *np.random.default_rng(0).standard_normal(91)], np.float32)
    read, raw, dtype = run("bits", "bfloat16", values)
    expected = to_bfloat16(values)
    expected[np.isnan(values)] = 0x7FC0
    assert dtype == "BFloat16"
    np.testing.assert_array_equal(raw.view(np.uint16), expected)
    np.testing.assert_array_equal(read, from_bfloat16(expected))
    for name in ("float16", "float64"):
        read, raw, _ = run("bits", name, values)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(raw.view(name), values.astype(name))
    for shape in ((0, 3), (), (1, 1)):
        read, raw, _ = run("bits", "bfloat16", np.ones(shape, np.float32))
        assert read.shape == shape and len(raw) == 2 * read.size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_in_another_order(dtype: str) -> None:
    read, raw, contiguous = run("strided", dtype)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(read, values)
    assert not contiguous
    assert raw.tobytes() == (to_bfloat16(values) if dtype == "bfloat16" else values).tobytes()


def test_copies_and_moves() -> None:
    found = run("copies_and_moves")
    assert found["dtype"] == "BFloat16" and np.abs(found["twin"]).max() <= 0.5
    assert 0 < found["same"] < 2**-9


def test_models_on_mindspores_own_meta_device(tmp_path: Path) -> None:
    assert run("meta_device")
    path = write_checkpoint(tmp_path, {"weight": np.ones(3, np.float32)})
    for place in (None, str(path)):
        error = run("buffer_on_meta", place, expect_error=True)
        assert error.type == "CheckpointError" and "left without values: inv_freq" in error.message


def test_persistent_buffers_are_loaded(tmp_path: Path) -> None:
    tensors = {"weight": np.full(3, 2, np.float32), "mean": np.full(3, 5, np.float32)}
    assert run("with_persistent_buffer", str(write_checkpoint(tmp_path, tensors))) == [5, 5, 5, 2, 2, 2] * 2


def test_parameters_without_values_cannot_be_used() -> None:
    """MindSpore itself would compute with zeros, raise for copies between devices, or end the process."""
    names = ["0.weight"] * 2 + ["1.gamma", "2.embedding_table", "1.gamma", "2.embedding_table"] + ["1.gamma"] * 3
    names.append("0.weight")
    said = run("unset_parameters_in_use")
    assert len(said) == len(names)
    for name, message in zip(names, said):
        assert message.startswith(f"{name} of local shape (6") and "call materialize(model)" in message


def test_a_distribution_that_is_given() -> None:
    assert abs(run("given_distribution") - 2.0) < 0.1
