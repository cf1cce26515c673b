"""MindSpore's jobs go on from checkpoints as PyTorch's do, and each from those of the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.checkpoint_jobs import EVERY_2, steps_in, train, write_text

pytestmark = pytest.mark.platform("mindspore")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> dict[int, float]:
    """The losses of a run of MindSpore at tp 2 that left checkpoints after steps 2, 4 and 6."""
    losses = train(root, "mindspore", *EVERY_2, platform="mindspore")
    assert steps_in(root, "mindspore") == [2, 4, 6]
    return losses


def after_4(root: Path, of: str, output: str, platform: str, degrees: tuple[int, int]) -> dict[int, float]:
    last = root / of / "checkpoints/step_000004"
    return train(root, output, "--checkpoint.resume", str(last), degrees=degrees, platform=platform)


def test_the_same_ranks_go_on_bit_by_bit(root: Path, whole: dict[int, float]) -> None:
    assert after_4(root, "mindspore", "same", "mindspore", (1, 2)) == {step: whole[step] for step in (5, 6)}


def test_another_number_of_ranks_goes_on(root: Path, whole: dict[int, float]) -> None:
    losses = after_4(root, "mindspore", "alone", "mindspore", (1, 1))
    assert losses == pytest.approx({step: whole[step] for step in (5, 6)}, abs=1e-4)


def test_pytorch_goes_on_where_mindspore_stopped(root: Path, whole: dict[int, float]) -> None:
    losses = after_4(root, "mindspore", "to torch", "torch", (1, 2))
    assert losses == pytest.approx({step: whole[step] for step in (5, 6)}, abs=1e-4)


def test_mindspore_goes_on_where_pytorch_stopped(root: Path) -> None:
    sharded = ["--parallelism.data-parallel", "fsdp"]
    whole = train(root, "torch", *EVERY_2, *sharded, platform="torch", degrees=(2, 1))
    losses = after_4(root, "torch", "to mindspore", "mindspore", (1, 2))
    assert losses == pytest.approx({step: whole[step] for step in (5, 6)}, abs=1e-4)
