"""In the workers: an operator on DTensors of many combinations of placements against the same on plain tensors.

A combination either gives the single-device result and the single-device gradients, or raises
UnsupportedOperatorError on every rank.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.common.api import _pynative_executor

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    UnsupportedOperatorError,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.layout import Layout

__all__ = ["Case", "check", "mesh_of"]

MOST_COMBINATIONS = 12


@dataclass(frozen=True)
class Case:
    """One operator call.

    Attributes:
        function: of the tensors; gives a tensor or several.
        inputs: ``"f5,3"`` floats of that shape, ``"p5,3"`` positive floats, ``"i5,3<7"`` integers below 7, ``"b5,3"``.
        must: combinations that must not be refused on two ranks, such as ``"S0 R"`` (``T`` is a plain tensor).
        never: combinations that must be refused on two ranks.
        gradients: whether to compare them.
        expected: what is right, of NumPy arrays, where the function cannot run on plain tensors.
    """

    function: Callable[..., Any]
    inputs: str
    must: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    gradients: bool = True
    expected: Callable[..., Any] | None = None


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def make_input(spec: str, rng: np.random.Generator) -> np.ndarray:
    kind, dims = spec[0], spec[1:].split("<")
    shape = [int(s) for s in dims[0].split(",") if s]
    if kind == "b":
        return rng.random(shape) < 0.5
    if kind == "i":
        return rng.integers(0, int(dims[1]), shape).astype(np.int32)
    x = rng.standard_normal(shape).astype(np.float32)
    return np.abs(x) + np.float32(0.5) if kind == "p" else x


def local_part(x: np.ndarray, layout: Layout, seed: int) -> np.ndarray:
    """This rank's part; the terms of a Partial are random."""
    part = np.array(x[tuple(slice(lo, hi) for lo, hi in layout.local_ranges())])
    for m, p in enumerate(layout.placements):
        if p.is_partial():
            group = layout.mesh.get_group(m)
            rng = np.random.default_rng([seed, m])
            noise = [rng.standard_normal(part.shape).astype(np.float32) for _ in range(group.size - 1)]
            part = [part - sum(noise), *noise][group.rank] if noise else part
    return np.asarray(part, x.dtype)


def combinations(case: Case, xs: Sequence[np.ndarray], mesh: DeviceMesh) -> list[tuple[tuple[str, ...], ...]]:
    """For each input one code per mesh dim (a plain tensor is ``T`` on all)."""
    per_input = []
    for x in xs:
        codes = [f"S{d}" for d in range(x.ndim)] + ["R"] + (["P"] if x.dtype.kind == "f" else [])
        per_input.append([("T",) * mesh.ndim, *itertools.product(codes, repeat=mesh.ndim)])
    every = [c for c in itertools.product(*per_input) if any(i[0] != "T" for i in c)]
    if len(every) > MOST_COMBINATIONS:
        wanted = set()
        if mesh.ndim == 1:
            wanted = {tuple((code,) for code in text.split()) for text in (*case.must, *case.never)}
        chosen = random.Random(0).sample(every, MOST_COMBINATIONS)
        every = chosen + sorted(wanted - set(chosen))
    return every


def check(case: Case, name: str, mesh: DeviceMesh) -> Counter[str]:
    """All combinations of one case; the counts of what happened."""
    rng = np.random.default_rng(0)
    xs = [make_input(spec, rng) for spec in case.inputs.split()]
    plain = [Tensor(x) for x in xs]
    differentiable = [i for i, x in enumerate(xs) if x.dtype.kind == "f" and case.gradients]
    if case.expected is None:
        expected = [y.asnumpy() for y in as_list(case.function(*plain))]
    else:
        expected = [np.asarray(y) for y in as_list(case.expected(*xs))]
    weights = [rng.standard_normal(y.shape).astype(np.float32) for y in expected]
    grads: list[np.ndarray] = []
    if differentiable and case.expected is None:
        whole = mindspore.grad(lambda *ts: weigh(as_list(case.function(*ts)), weights), tuple(differentiable))
        grads = [g.asnumpy() for g in as_list(whole(*plain))]
    counts: Counter[str] = Counter()
    for combination in combinations(case, xs, mesh):
        label = " ".join("".join(codes) for codes in combination)
        where = f"{name}[{label}] on {mesh.describe()}"
        error = attempt(case, where, mesh, xs, combination, expected, weights, differentiable, grads)
        agree(error is None, where)
        counts["refused" if error else "right"] += 1
        if mesh.ndim == 1 and mesh.size() == 2:
            if label in case.must and error is not None:
                raise AssertionError(f"{where} was refused") from error
            if label in case.never and error is None:
                raise AssertionError(f"{where} was not refused")
    return counts


def attempt(
    case: Case,
    where: str,
    mesh: DeviceMesh,
    xs: Sequence[np.ndarray],
    combination: tuple[tuple[str, ...], ...],
    expected: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    differentiable: Sequence[int],
    grads: Sequence[np.ndarray],
) -> Exception | None:
    layouts: list[Layout | None] = []
    locals_: list[Tensor] = []
    for i, (x, codes) in enumerate(zip(xs, combination)):
        layout = None if codes[0] == "T" else Layout(mesh, [parse(c) for c in codes], x.shape)
        layouts.append(layout)
        locals_.append(Tensor(x if layout is None else local_part(x, layout, i)))

    def run(*locals_: Tensor) -> list[Any]:
        inputs = [
            x if layout is None else DTensor.from_local(x, mesh, layout.placements, shape=layout.shape)
            for x, layout in zip(locals_, layouts)
        ]
        return as_list(case.function(*inputs))

    try:
        found = run(*locals_)
    except UnsupportedOperatorError as error:
        return error
    except RuntimeError as error:
        if "Cannot found __fallback__ attr" in str(
            error
        ):  # a method of a plain tensor got a DTensor: MindSpore's refusal
            return error
        raise
    assert len(found) == len(expected), f"{where}: {len(found)} results, expected {len(expected)}"
    for y, wanted in zip(found, expected):
        if isinstance(y, DTensor):
            assert tuple(y.shape) == wanted.shape, f"{where}: shape {y.shape}, expected {wanted.shape}"
            assert tuple(y.to_local().shape) == y.global_layout.local_shape, where
            y = y.full_tensor()
        close(y.asnumpy(), wanted, f"{where}: result")
    if grads:
        again = mindspore.grad(
            lambda *ts: weigh([y.full_tensor() if isinstance(y, DTensor) else y for y in run(*ts)], weights),
            tuple(differentiable),
        )
        try:
            found_grads = as_list(again(*locals_))
        except UnsupportedOperatorError as error:
            _pynative_executor.clear_res()  # else the executor goes on recording
            _pynative_executor.set_grad_flag(False)
            return error
        for i, grad, wanted in zip(differentiable, found_grads, grads):
            layout = layouts[i]
            if layout is not None:
                ranges = layout.gradient_layout.local_ranges()
                wanted = wanted[tuple(slice(lo, hi) for lo, hi in ranges)]
            close(grad.asnumpy(), wanted, f"{where}: gradient of input {i}")
    return None


def parse(code: str) -> Any:
    """``S0`` ``R`` ``P``."""
    return Shard(int(code[1:])) if code[0] == "S" else Partial() if code == "P" else Replicate()


def weigh(outputs: Sequence[Any], weights: Sequence[np.ndarray]) -> Any:
    """A scalar of all floating outputs."""
    platform = get_platform()
    total: Any = 0.0
    for y, w in zip(outputs, weights):
        if platform.is_floating_point(y):
            total = total + platform.sum_tokens(y * Tensor(w))
    return total


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def close(found: np.ndarray, expected: np.ndarray, where: str) -> None:
    np.testing.assert_allclose(
        found.astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-5, err_msg=where
    )


def agree(accepted: bool, where: str) -> None:
    """All ranks decided alike."""
    platform = get_platform()
    group = mesh_of((platform.world_size(),)).get_group()
    seen = platform.to_numpy(platform.all_gather(Tensor(np.array([accepted], np.int32)), group)).ravel()
    assert len(set(seen.tolist())) == 1, f"{where}: accepted on some ranks only: {seen}"
