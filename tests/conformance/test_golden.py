"""The golden file: values in float64 that hold for every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.conformance.cases import REDUCTIONS, LossCase, expected_results
from tests.conformance.groups import on_groups
from tests.conformance.loss_calls import check
from tests.conformance.oracle import assert_close, reference

_GOLDEN = yaml.safe_load((Path(__file__).parents[1] / "golden" / "loss_golden.yaml").read_text(encoding="utf-8"))
_EXPECTED = _GOLDEN["expected"]
_SIZES = (1, 2, 3, 4, 5, 8)


def golden_case(mesh: tuple[int, ...], *, weighted: bool = False, **fields: Any) -> LossCase:
    """The file's logits, classes on the last mesh dim, tokens on a first one."""
    return LossCase(
        np.array(_GOLDEN["logits"], np.float64),
        np.array(_GOLDEN["target"]),
        mesh,
        (0, 1)[-len(mesh) :],
        ("dp", "tp")[-len(mesh) :],
        weight=np.array(_GOLDEN["weight"], np.float64) if weighted else None,
        ignore_index=_GOLDEN["ignore_index"],
        **fields,
    )


def grad_of(case: LossCase, results: list[dict[str, Any]]) -> np.ndarray:
    """The whole gradient, put together from the ranks' parts."""
    whole = np.full(case.logits.shape, np.nan)
    for rank, result in enumerate(results):
        whole[case.slices(rank)] = result["grad"]
    return whole


@pytest.mark.contract("G1", "P1", "P3")
@on_groups(*_SIZES)
@pytest.mark.parametrize("section", ["plain", "weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_and_gradient(platform: str, world_size: int, section: str, reduction: str, dtype: str) -> None:
    """P=3 cuts unevenly, P=5 and 8 cut 8 classes into twos and ones, leaving ranks empty."""
    case = golden_case((world_size,), weighted=section == "weight", reduction=reduction, dtype=dtype)
    results = check(platform, case)
    for result in results:
        assert_close(result["loss"], _EXPECTED[section][reduction], dtype, "loss", scale=10.0)
    if f"grad_abs_sum_of_{reduction}" in _EXPECTED[section]:
        total = np.abs(grad_of(case, results)).sum()
        assert_close(total, _EXPECTED[section][f"grad_abs_sum_of_{reduction}"], dtype, "sum of |gradient|")
    if f"grad_l2_of_{reduction}" in _EXPECTED[section]:
        norm = np.sqrt((grad_of(case, results) ** 2).sum())
        assert_close(norm, _EXPECTED[section][f"grad_l2_of_{reduction}"], dtype, "norm of the gradient")


@pytest.mark.contract("P4", "TRAP9")
@on_groups(2, 4, 8)
@pytest.mark.parametrize(
    ("key", "weighted", "reduction"),
    [("dp2_mean", False, "mean"), ("dp2_weighted_mean", True, "mean"), ("dp2_sum", False, "sum")],
)
def test_two_data_parallel_ranks(platform: str, world_size: int, key: str, weighted: bool, reduction: str) -> None:
    """Tokens with unequal valid counts on two dp ranks; every rank shows the global value."""
    case = golden_case((2, world_size // 2), weighted=weighted, reduction=reduction)
    for result in check(platform, case):
        assert_close(result["loss"], _EXPECTED[key], "float32", key)
        assert_close(result["float"], _EXPECTED[key], "float32", f"float() of {key}")


@pytest.mark.contract("P4", "P2")
@on_groups(2, 4)
def test_all_tokens_of_a_data_parallel_rank_ignored(platform: str, world_size: int) -> None:
    """The rank without a valid token counts nothing; the mean is finite, on every rank."""
    case = golden_case((2, world_size // 2))
    case = case.but(target=np.array([1, 6, -100, -100]))
    for result in check(platform, case):
        assert_close(result["loss"], _EXPECTED["dp2_second_rank_all_ignored_mean"], "float32", "mean")


@pytest.mark.contract("G1")
@pytest.mark.platform("torch")  # touches no framework, but needs a platform to be counted for
def test_oracle_agrees_with_the_file() -> None:
    """The reference gives the file's values, those of the functional interface too."""
    axis, target, ignore = 1, np.array(_GOLDEN["target"]), _GOLDEN["ignore_index"]
    for parts in _SIZES:
        shards = reference.cut(_GOLDEN["logits"], parts, axis)
        for section, values in _EXPECTED.items():
            if not isinstance(values, dict):
                continue
            tokens = reference.cross_entropy(
                shards,
                axis,
                target,
                weight=_GOLDEN["weight"] if "weight" in section else None,
                ignore_index=ignore,
                label_smoothing=0.1 if "smoothing" in section else 0.0,
            )
            for reduction in REDUCTIONS:
                (loss, gradients) = reference.reduce_tokens([tokens], reduction)
                loss = loss[0] if reduction == "none" else loss
                np.testing.assert_allclose(loss, values[reduction], rtol=1e-12, err_msg=f"{section} {reduction}")
                key = f"grad_abs_sum_of_{reduction}"
                if key in values:
                    total = sum(np.abs(gradient).sum() for gradient in gradients[0])
                    np.testing.assert_allclose(total, values[key], rtol=1e-12, err_msg=f"{section} {key}")
        np.testing.assert_allclose(reference.lse(shards, axis), _EXPECTED["lse"], rtol=1e-12)
        np.testing.assert_allclose(reference.entropy(shards, axis), _EXPECTED["entropy"], rtol=1e-12)
        np.testing.assert_allclose(reference.z_loss(shards, axis, 1e-4), _EXPECTED["z_loss_1e-4"], rtol=1e-12)


@pytest.mark.contract("P4")
@pytest.mark.platform("torch")
def test_expected_results_are_the_files() -> None:
    """What the suite expects of a case with two dp ranks is what the file says."""
    case = golden_case((2, 2))
    assert [float(loss) for loss, _ in expected_results(case)] == pytest.approx([_EXPECTED["dp2_mean"]] * 4, rel=1e-12)
