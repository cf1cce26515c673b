"""``hyper-parallel export``: a folder that transformers loads, with the logits of the trained model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.trainer.byte_tokenizer_files import write_byte_tokenizer
from hyper_parallel.trainer.command_line import parse_train_options
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.export_command import _write_tokenizer
from hyper_parallel.trainer.text import ByteTokenizer
from hyper_parallel.trainer.tokenizer import JsonTokenizer, load_tokenizer
from tests.harness import run_distributed
from tests.trainer.checkpoint_jobs import EVERY_2, arguments_of, train, write_text

pytestmark = pytest.mark.platform("torch")
IDS = [[1, 2, 3, 250, 256, 0, 77, 8]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_text(folder / "text")
    train(folder, "run", *EVERY_2, "--parallelism.data-parallel", "fsdp", degrees=(2, 1))
    return folder


def trained_logits(arguments: list[str], path: str) -> np.ndarray:
    """Of the model as the trainer builds it, with the weights of a checkpoint."""
    import torch

    from hyper_parallel import init_device_mesh
    from hyper_parallel.platform.training import load_training_tools
    from hyper_parallel.tensor_parallel.hf_load import load_hf_checkpoint
    from hyper_parallel.trainer.setup import build_model

    options = parse_train_options(arguments)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = build_model(options, mesh, load_training_tools()).model
    load_hf_checkpoint(model, path)
    with torch.no_grad():
        logits: Any = model(torch.tensor(IDS))
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    found: np.ndarray = whole.numpy()
    return found


@pytest.mark.parametrize("options", [[], ["--max-shard-bytes", "40000"]])
def test_transformers_computes_the_same(options: list[str], root: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    target = tmp_path / "exported"
    assert main(["export", str(root / "run"), str(target), *options]) == 0
    weights = sorted(p.name for p in target.glob("*.safetensors"))
    assert (weights == ["model.safetensors"]) == (not options) and not list(target.glob(".*"))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        logits = model(torch.tensor(IDS)).logits.numpy()
    checkpoint = root / "run/checkpoints/step_000006/model"
    ours = run_distributed(trained_logits, arguments_of(root, "other"), str(checkpoint))
    assert np.abs(logits - ours[0]).max() < 2e-5 and np.abs(logits).max() > 0.1


def test_one_checkpoint_can_be_named(root: Path, tmp_path: Path) -> None:
    for step in (2, 4):
        assert main(["export", str(root / f"run/checkpoints/step_00000{step}"), str(tmp_path / str(step))]) == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("2", "4")]
    assert files[0] != files[1]
    assert json.loads((tmp_path / "2/config.json").read_text())["model_type"] == "llama"


def test_the_tokenizer_is_the_file_that_the_run_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tokenizer.json", "other.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(name)

    def found(path: Path) -> dict[str, str]:
        target = tmp_path / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        written = _write_tokenizer({"text": {"tokenizer": str(path)}}, target)
        assert sorted(written) == sorted(file.name for file in target.iterdir())
        return {name: (target / name).read_text() for name in written}

    beside = {"tokenizer_config.json": "tokenizer_config.json"}
    assert found(tmp_path / "other.json") == {"tokenizer.json": "other.json", **beside}
    assert found(tmp_path) == {"tokenizer.json": "tokenizer.json", **beside}
    assert capsys.readouterr().err == ""
    assert found(tmp_path / "gone.json") == {}
    assert "gone.json, is gone: none is written" in capsys.readouterr().err


def test_a_run_on_bytes_leaves_a_tokenizer_of_bytes(root: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    target = tmp_path / "exported"
    assert main(["export", str(root / "run"), str(target)]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    text = "".join(map(chr, range(0x250))) + " two  spaces\n\u4e2d\u6587 \U0001f600\r\n\t end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == ByteTokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert marks == (ByteTokenizer.bos_id, ByteTokenizer.eos_id, ByteTokenizer.pad_id)
    assert len(tokenizer) == ByteTokenizer.vocab_size
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert model.generation_config.eos_token_id == ByteTokenizer.eos_id
    batch = tokenizer(["one", "more"], padding=True, return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=2).shape == (2, 6)


def test_the_tokenizer_of_bytes_is_known_again(root: Path, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    assert isinstance(load_tokenizer(TextOptions(tokenizer=tmp_path)), ByteTokenizer)
    by_the_package = JsonTokenizer(tmp_path / "tokenizer.json")
    content = "héllo <bos>".encode()
    assert by_the_package.encode_batch([content])[0].tolist() == list(content)
    assert (by_the_package.bos_id, by_the_package.eos_id) == (ByteTokenizer.bos_id, ByteTokenizer.eos_id)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # changed by somebody, it is what it says
        with open(tmp_path / name, "a") as file:
            file.write("\n")
        assert isinstance(load_tokenizer(TextOptions(tokenizer=tmp_path)), JsonTokenizer)
        write_byte_tokenizer(tmp_path)


def test_what_cannot_be_exported_is_said(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert main(["export", str(root / "run"), str(tmp_path / "full")]) == 1
    assert "full is there already" in capsys.readouterr().err
    assert main(["export", str(root / "text"), str(tmp_path / "new")]) == 1
    assert "no checkpoint at" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]
