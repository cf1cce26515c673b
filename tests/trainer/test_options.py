"""Options: command line before file before defaults; what does not exist is named, with near matches."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel import cli
from hyper_parallel.trainer import devices
from hyper_parallel.trainer.command_line import UsageError, parse_options, parse_train_options
from hyper_parallel.trainer.compare_command import CompareOptions
from hyper_parallel.trainer.eval_options import EvalOptions
from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.schedule import warmup_cosine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        "steps: 7\ndata: null\ntext: {document_masks: true, prefetch: 0}\n"
        "optimizer: {lr: 1e-4, betas: [0.8, 0.9]}\n"
        "parallelism:\n  disable_loss_parallel: true\n  loss_parallel_strict_mesh: false\n"
    )
    return path


def test_defaults() -> None:
    assert parse_train_options([]) == TrainOptions()


def test_the_file_goes_before_the_defaults_and_the_command_line_before_the_file(file: Path) -> None:
    options = parse_train_options([str(file), "--steps", "9", "--optimizer.betas", "0.5", "0.6"])
    assert options.steps == 9 and options.optimizer.betas == (0.5, 0.6)
    assert options.text.document_masks and options.optimizer.lr == 1e-4
    assert options.parallelism.disable_loss_parallel and not options.parallelism.loss_parallel_strict_mesh
    assert options.parallelism.tensor_parallel_degree == 2 and options.training == TrainOptions().training


def test_backends_and_commands_write_into_folders_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("output: runs/{backend}/job\n")
    mindspore = ["--backend", "mindspore"]
    for kind, command, name in (
        (TrainOptions, "train", "llama_bytes"),
        (CompareOptions, "compare", "compare"),
        (EvalOptions, "eval", "eval"),
    ):
        assert str(parse_options(kind, command, []).output) == f"outputs/{name}_torch"
        assert str(parse_options(kind, command, mindspore).output) == f"outputs/{name}_mindspore"
        assert str(parse_options(kind, command, [*mindspore, "--output", "here"]).output) == "here"
    assert str(parse_train_options([str(path), *mindspore]).output) == "runs/mindspore/job"


def test_a_home_folder_in_the_file_is_the_one_that_a_shell_means(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("data: ~/texts\ntext: {tokenizer: ~/a/tokenizer.json, field: '~'}\n")
    options = parse_train_options([str(path)])
    assert options.data == Path.home() / "texts" and options.text.tokenizer == Path.home() / "a/tokenizer.json"
    assert options.text.field == "~"


def test_hyphens_and_underscores_are_alike() -> None:
    assert parse_train_options(["--training.batch-size", "3"]) == parse_train_options(["--training.batch_size=3"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lrr", "1"], "--optimizer.lr"),
        (["--stepz", "1"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--steps", "0"], "steps must be at least 1, found 0"),
        (["--optimizer.lr", "-1"], "lr must be positive and finite, found -1"),
        (["--optimizer.betas", "0.9", "1.0"], "betas must lie in"),
        (["--model.hidden-size", "101"], "must be a multiple of num_attention_heads"),
        (
            ["--parallelism.tensor-parallel-degree", "0"],
            "tensor_parallel_degree must be an integer of at least 1",
        ),
        (["--backend", "tensorflow"], "tensorflow"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        parse_train_options(arguments)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "training: {batch_sise: 3}",
            "unknown option 'training.batch_sise'; did you mean 'training.batch_size'",
        ),
        ("xyzzy: 1", "unknown option 'xyzzy'; options are data, output"),
        ("- 1", "holds a list; expected a mapping"),
        ("a: [", "cannot read options from"),
        ("output: null", "output is null; expected a value, or leave it out"),
        ("training: {batch_size: ~}", "training.batch_size is null"),
        ("steps: 3\nseed: 1\nsteps: 4", "wrong.yaml: 'steps' is there twice, in line 3"),
        ("training:\n  loss_chunks: 3\n  loss_chunks: 3", "'loss_chunks' is there twice, in line 3"),
        ("training.loss_chunks: 3\ntraining: {loss_chunks: 4}", "'training.loss_chunks' is there twice"),
    ],
)
def test_a_wrong_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match="wrong.yaml") as raised:
        parse_train_options([str(path)])
    assert message in str(raised.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match="cannot read options from nowhere.yaml"):
        parse_train_options(["nowhere.yaml"])


def test_help_shows_every_field_with_its_docstring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        parse_train_options(["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Local worker processes to start" in text and "Width of the residual stream" in text
    assert "True: the last layer gives replicated full logits" in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trian"], 2, "unknown command 'trian'; did you mean 'train'?"),
        (["train", "--nproc", "3"], 2, "tensor_parallel_degree (2) = 2 must equal nproc (3)"),
        (["train", "--data", "/nowhere/at/all"], 2, "no data at /nowhere/at/all"),
        (
            ["train", "--model.num-attention-heads", "1", "--model.num-key-value-heads", "1"],
            2,
            "heads (1) must be a mult",
        ),
        (["train", "--output", "file/x"], 2, "train: cannot make the output folder file/x: Not a directory"),
        (["compare", "--output", "file"], 2, "compare: cannot make the output folder file: File exists"),
        (["train", "--device", "cuda"], 2, "device 'cuda': torch sees 1 here, and nproc (2) processes need one each"),
    ],
)
def test_wrong_usage_is_told_before_any_worker_starts(
    arguments: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "_count", lambda program: 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(arguments) == status
    assert message in capsys.readouterr().err


def test_the_schedule_warms_up_and_decays() -> None:
    rates = [warmup_cosine(s, peak=2.0, warmup_steps=4, total_steps=11, final_ratio=0.1) for s in range(11)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0 and rates[7] == pytest.approx(1.1) and rates[10] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    short = [warmup_cosine(s, peak=1.0, warmup_steps=5, total_steps=2, final_ratio=0.0) for s in range(2)]
    assert short == [0.2, 0.4]
