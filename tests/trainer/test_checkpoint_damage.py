"""Checkpoints that cannot be read or written: one error on all ranks that names the file, and nothing half-written
is taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import run_distributed, this_rank
from tests.trainer.checkpoint_jobs import EVERY_2, arguments_of, failures, losses_of, steps_in, train, write_text

pytestmark = pytest.mark.platform("torch")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    write_text(folder / "text")
    train(folder, "run", *EVERY_2)
    return folder


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 6', '"step": 5', 1))


def add(path: Path) -> None:
    shutil.copy(next(path.parent.glob("*.safetensors")), path)


MODEL, OPTIMIZER = "model/model-00001-of-", "optimizer/model-00002-of-"
INDEX = "model.safetensors.index.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a bit of the weights": (MODEL, flip, "is damaged"),
    "a bit of the optimizer": (OPTIMIZER, flip, "is damaged"),
    "a bit of the state": ("state.json", flip, "is damaged"),
    "a number of the list": ("manifest.json", replace_step, "is damaged"),
    "an index": (f"optimizer/{INDEX}", flip, "is damaged"),
    "weights cut short": (MODEL, cut, "is cut short"),
    "a list cut short": ("manifest.json", lambda path: path.write_text(path.read_text()[:-20]), "is not JSON"),
    "no optimizer file": (OPTIMIZER, Path.unlink, "cannot be read"),
    "no state": ("state.json", Path.unlink, "cannot be read"),
    "no list": ("manifest.json", Path.unlink, "cannot open"),
    "no config": ("model/config.json", Path.unlink, "cannot be read"),
    "a file too many": ("model/model.safetensors", add, "is not part of the checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named_on_all_ranks(name: str, root: Path, tmp_path: Path) -> None:
    prefix, damage, message = DAMAGES[name]
    write_text(tmp_path / "text")
    shutil.copytree(root / "run", tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step_000006"
    files = [p for p in checkpoint.rglob("*") if p.relative_to(checkpoint).as_posix().startswith(prefix)]
    path = checkpoint / prefix if damage is add else files[0]
    damage(path)
    errors = failures(tmp_path, "run", *EVERY_2, "--steps", "8")
    assert errors[0] == errors[1] and errors[0].type == "CheckpointError"
    assert str(path) in errors[0].message and message in errors[0].message
    assert steps_in(tmp_path, "run") == [2, 4, 6], "somebody has removed what could be looked at"


def test_the_one_before_can_be_taken_when_the_damaged_one_is_removed(root: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    shutil.copytree(root / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_000006")
    assert len(train(tmp_path, "run", *EVERY_2)) == 6


@pytest.mark.parametrize(
    ("resume", "message"), [("nowhere", "no checkpoint at"), ("text", "no checkpoint at"), ("run/step_000099", "no ")]
)
def test_a_path_without_a_checkpoint_is_named(resume: str, message: str, root: Path) -> None:
    errors = failures(root, "other", "--checkpoint.resume", str(root / resume))
    assert errors[0] == errors[1] and message in errors[0].message and resume in errors[0].message


def test_another_model_is_refused_in_words(root: Path) -> None:
    options = ["--checkpoint.resume", str(root / "run"), "--model.num-hidden-layers", "1"]
    errors = failures(root, "other", *options)
    assert errors[0] == errors[1] and "does not fit the model" in errors[0].message
    errors = failures(root, "other", "--checkpoint.resume", str(root / "run"), "--model.rope-theta", "5")
    assert errors[0] == errors[1] and "model.rope_theta 10000.0 -> 5.0" in errors[0].message


def test_other_text_is_refused(root: Path) -> None:
    options = ["--checkpoint.resume", str(root / "run"), "--training.batch-size", "2"]
    errors = failures(root, "other", *options)
    assert errors[0] == errors[1] and "batch_size" in errors[0].message


@contextlib.contextmanager
def at_most(number: int, rank: int) -> Iterator[None]:
    """On one rank no file may get longer: what a full disk does, for one process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if this_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train_with_little_room(arguments: list[str], number: int, rank: int) -> None:
    with at_most(number, rank):
        losses_of(arguments)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_one_error_and_leaves_nothing(rank: int, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    train(tmp_path, "run")  # leaves the text as token ids
    arguments = arguments_of(tmp_path, "run", *EVERY_2)
    errors = run_distributed(train_with_little_room, arguments, 20000, rank, expect_error=True, timeout=60)
    assert errors[0] == errors[1] and errors[0].type == "CheckpointError"
    assert "File too large" in errors[0].message and f"rank {rank}: cannot write " in errors[0].message
    assert ".safetensors" in errors[0].message
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("in the way")
    errors = failures(tmp_path, "run", *EVERY_2)
    assert errors[0] == errors[1] and errors[0].type == "CheckpointError"
    assert "run/checkpoints" in errors[0].message and "Not a directory" in errors[0].message
