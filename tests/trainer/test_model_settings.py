"""Every way to run the model finds the losses, and the norms of the gradients, of the plain run on one device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hyper_parallel.tensor_parallel.checkpoint_files import open_checkpoint
from tests.trainer.small_jobs import train, write_text

pytestmark = pytest.mark.platform("torch")

Columns = dict[str, dict[int, float]]

DDP = ("--parallelism.data-parallel", "ddp")
FSDP = ("--parallelism.data-parallel", "fsdp")
SEQUENCE = ("--parallelism.enable-sequence-parallel",)
CHUNKED = ("--training.loss", "chunked", "--training.loss-chunks", "3")
LINEAR = ("--training.loss", "linear")
CHECKPOINT = ("--training.activation-checkpoint", "full")
COMPILE = ("--training.compile", "--training.compile-backend", "aot_eager")
TWO_PARTS = ("--training.gradient-accumulation", "2")
BF16 = ("--training.mixed-precision-param", "bfloat16")

EXACT = {
    "1x2": (1, 2, ()),
    "2x1": (2, 1, ()),
    "2x2, two parts": (2, 2, TWO_PARTS),
    "ddp 2x1, two parts": (2, 1, (*DDP, *TWO_PARTS)),
    "ddp 2x2": (2, 2, DDP),
    "fsdp 1x1": (1, 1, FSDP),
    "fsdp 2x1, two parts": (2, 1, (*FSDP, *TWO_PARTS)),
    "fsdp 2x2": (2, 2, FSDP),
    "fsdp 2x2, chunked, checkpoint": (2, 2, (*FSDP, *CHUNKED, *CHECKPOINT)),
    "sequence parallel 1x2": (1, 2, SEQUENCE),
    "sequence parallel 2x2, fsdp": (2, 2, (*SEQUENCE, *FSDP)),
    "sequence parallel 2x2, checkpoint": (2, 2, (*SEQUENCE, *CHECKPOINT)),
    "sequence parallel 2x2, ddp, chunked": (2, 2, (*SEQUENCE, *DDP, *CHUNKED)),
    "chunked 1x1": (1, 1, CHUNKED),
    "chunked 1x2": (1, 2, CHUNKED),
    "chunked 1x2, loss parallel off": (1, 2, (*CHUNKED, "--parallelism.disable-loss-parallel")),
    "linear 1x1": (1, 1, LINEAR),
    "linear 1x2": (1, 2, LINEAR),
    "linear 2x2, sequence parallel": (2, 2, (*LINEAR, *SEQUENCE)),
    "linear 2x2, fsdp": (2, 2, (*LINEAR, *FSDP)),
    "linear 2x1, ddp, two parts": (2, 1, (*LINEAR, *DDP, *TWO_PARTS)),
    "checkpoint 1x1": (1, 1, CHECKPOINT),
    "checkpoint 1x2": (1, 2, CHECKPOINT),
    "compile 1x1": (1, 1, COMPILE),
    "compile 2x1, fsdp": (2, 1, (*COMPILE, *FSDP)),
    "compile 2x1, ddp": (2, 1, (*COMPILE, *DDP)),
    "compile 1x2, checkpoint": (1, 2, (*COMPILE, *CHECKPOINT)),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def alone(text: Path) -> Columns:
    return train(text, 1, 1)


@pytest.mark.contract("G5", "V2")
@pytest.mark.parametrize("name", EXACT)
def test_equals_the_plain_run(name: str, text: Path, alone: Columns) -> None:
    dp, tp, arguments = EXACT[name]
    found = train(text, dp, tp, *arguments)
    assert found["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


NARROW = {
    "1x2": (1, 2, ()),
    "1x2, chunked, sequence parallel": (1, 2, (*CHUNKED, *SEQUENCE)),
    "2x1, two parts": (2, 1, TWO_PARTS),
    "ddp 2x1, two parts": (2, 1, (*DDP, *TWO_PARTS)),
    "fsdp 2x1": (2, 1, FSDP),
    "fsdp 2x2": (2, 2, FSDP),
}


@pytest.mark.parametrize("name", ["1x2", "ddp 2x1, two parts", "fsdp 2x1"])
def test_bfloat16_goes_on_from_a_checkpoint_as_if_never_stopped(name: str, text: Path, tmp_path: Path) -> None:
    """The optimizer's float32 values come back, not those that the model computed in."""
    dp, tp, arguments = NARROW[name]
    steady = (*BF16, *arguments, "--optimizer.final-lr-ratio", "1")
    through = train(text, dp, tp, *steady, "--output", str(tmp_path / "through"))
    assert all(0 < norm < math.inf for norm in through["grad_norm"].values())
    halves = (*steady, "--checkpoint.enable", "--output", str(tmp_path / "halves"))
    train(text, dp, tp, *halves, "--steps", "2")
    assert train(text, dp, tp, *halves)["loss"] == through["loss"]
    folder = tmp_path / "halves/checkpoints/step_000004"
    optimizer, model = (open_checkpoint(folder / kind).tensors for kind in ("optimizer", "model"))
    # where the parameters themselves have fewer bits, those that they are rounded from are the optimizer's
    wide = model if FSDP[1] in arguments else {k: t for k, t in optimizer.items() if k.endswith(".float32")}
    assert len(wide) == len(model)
    assert {stored.entry.dtype for stored in [*optimizer.values(), *wide.values()]} == {"float32"}


@pytest.mark.parametrize("name", NARROW)
def test_bfloat16_stays_close_to_float32(name: str, text: Path, alone: Columns) -> None:
    dp, tp, arguments = NARROW[name]
    found = train(text, dp, tp, *BF16, *arguments)
    # logits of about 1 in 8 bits: a loss that is off by a few thousandths
    assert found["loss"] == pytest.approx(alone["loss"], abs=0.02)
    assert found["loss"] != alone["loss"]
