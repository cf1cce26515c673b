"""The same job on MindSpore finds the losses and norms that PyTorch finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.small_jobs import train, write_text

pytestmark = pytest.mark.platform("mindspore")

Columns = dict[str, dict[int, float]]

CHUNKED = ("--training.loss", "chunked", "--training.loss-chunks", "3")
CHECKPOINT = ("--training.activation-checkpoint", "full")

ARRANGEMENTS = {
    "1x1": (1, 1, ()),
    "1x2": (1, 2, ()),
    "2x1, two parts": (2, 1, ("--training.gradient-accumulation", "2")),
    "2x2, checkpoint": (2, 2, CHECKPOINT),
    "1x2, sequence parallel": (1, 2, ("--parallelism.enable-sequence-parallel",)),
    "1x2, linear": (1, 2, ("--training.loss", "linear")),
    "1x1, chunked, checkpoint": (1, 1, (*CHUNKED, *CHECKPOINT)),
    "1x2, chunked, sequence parallel, checkpoint": (
        1,
        2,
        (*CHUNKED, *CHECKPOINT, "--parallelism.enable-sequence-parallel"),
    ),
    "1x2, loss parallel off": (1, 2, ("--parallelism.disable-loss-parallel",)),
}
VALIDATION = ("--validation.freq", "2", "--validation.held-out", "0.1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def on_torch(text: Path) -> Columns:
    return train(text, 1, 1, *VALIDATION)


@pytest.mark.contract("C4", "G5")
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_equals_pytorch(name: str, text: Path, on_torch: Columns) -> None:
    dp, tp, arguments = ARRANGEMENTS[name]
    found = train(text, dp, tp, *VALIDATION, *arguments, platform="mindspore", timeout=120)
    assert found["loss"] == pytest.approx(on_torch["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(on_torch["grad_norm"], rel=1e-4)
    assert found["validation_loss"] == pytest.approx(on_torch["validation_loss"], abs=1e-5)
    assert found["validation_tokens"] == on_torch["validation_tokens"]
